"use strict";

// Tokens: arrays of a row, spans that show tokens, and details of the token under the pointer.
// Text of conversations enters the page only as text nodes; no code here parses markup.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

function button(text, onClick, className = "") {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

function decimals(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (Number.isInteger(value)) return String(value).replace("-", "\u2212");
  const shown = Math.abs(value) >= 1e-3 ? value.toFixed(digits) : value.toExponential(1);
  return shown.replace("-", "\u2212");
}

const signed = (value, digits) => (value > 0 ? "+" : "") + decimals(value, digits);

function unpack(text, Type) {
  return new Type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}

// Return the arrays of a part, unpacked on first use. Arrays of action tokens are indexed by order[i].
function numbers(row, part) {
  if (part.numbers) return part.numbers;
  const ids = unpack(part.ids, Int32Array);
  const order = new Int32Array(ids.length).fill(-1);
  let actions = 0;
  for (const [start, end] of part.mask) for (let i = start; i < end; i++) order[i] = actions++;
  const floats = (name) => (part[name] === undefined ? null : unpack(part[name], Float32Array));
  part.numbers = {
    ids,
    order,
    logProbs: floats("log_probs"),
    refLogProbs: floats("ref_log_probs"),
    newLogProbs: floats("new_log_probs"),
    advantages: floats("advantages") ?? (row.advantage === null ? null : new Float32Array(actions).fill(row.advantage)),
    versions: part.versions === undefined ? null : unpack(part.versions, Int32Array),
  };
  return part.numbers;
}

const entry = (id) => data.vocabulary[id] ?? [""];

function tokenText(part, ids, i) {
  return part.texts[i] ?? entry(ids[i])[0] ?? "";
}

function wholeText(row) {
  if (row.text === undefined) {
    const texts = row.parts.map((part) => {
      const ids = unpack(part.ids, Int32Array);
      return Array.from(ids, (_, i) => tokenText(part, ids, i)).join("");
    });
    row.text = texts.join("\n").toLowerCase();
  }
  return row.text;
}

// Characters that are invisible, reorder text, or look like a space: shown by name.
const UNSEEN = /(?! )[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Z}]|[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/gu;
const NAMES = { 0: "NUL", 7: "BEL", 8: "BS", 13: "CR", 27: "ESC", 127: "DEL", 0xa0: "NBSP", 0x200d: "ZWJ" };

function nameOf(character) {
  const code = character.codePointAt(0);
  return NAMES[code] ?? "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

function putText(parent, text) {
  let done = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > done) parent.append(text.slice(done, found.index));
    const seen = { "\t": "tab", "\n": "line-end" }[found[0]];
    if (seen) parent.append(element("span", seen), found[0]);
    else parent.append(element("span", "unseen", nameOf(found[0])));
    done = found.index + found[0].length;
  }
  if (done < text.length) parent.append(text.slice(done));
  return parent;
}

// Name these characters in plain text, for the options of a select.
const plainText = (text) => text.replace(UNSEEN, (character) => `\u2039${nameOf(character)}\u203a`);

const LEVELS = [0.9, 0.7, 0.5, 0.25, 0.1, 0.01]; // probabilities at which the shade changes
const sizes = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value) || 0), 0);
const largestAdvantage = sizes(
  data.rows.flatMap((row) => [row.advantage, ...row.parts.map((part) => (part.advantages ? sizes(unpack(part.advantages, Float32Array)) : 0))]),
);

function advantageClass(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (value === 0) return "even";
  return (value > 0 ? "up" : "down") + Math.max(1, Math.ceil((4 * Math.abs(value)) / largestAdvantage - 1e-6));
}

const CHANGES = [0.01, 0.1, 0.5, 1]; // changes of a log-prob, in nats, at which the shade changes

function changeClass(value) {
  const level = CHANGES.filter((least) => Math.abs(value) >= least).length;
  return level ? (value > 0 ? "rise" : "fall") + level : "";
}

function tokenSpan(row, part, i) {
  const { ids, order, logProbs, newLogProbs, advantages } = numbers(row, part);
  const [, , special, bytes] = entry(ids[i]);
  const span = element("span", "token");
  span.dataset.i = i;
  span.tabIndex = -1;
  const place = order[i];
  if (place >= 0) {
    span.classList.add("action");
    const logProb = logProbs?.[place];
    if (logProb !== undefined && !Number.isNaN(logProb)) {
      const level = LEVELS.findIndex((p) => Math.exp(logProb) >= p);
      span.classList.add("p" + (level < 0 ? LEVELS.length : level));
    }
    const shade = advantageClass(advantages?.[place]);
    if (shade) span.classList.add(shade);
    const change = newLogProbs && changeClass(newLogProbs[place] - logProb);
    if (change) span.classList.add(change);
  }
  const text = tokenText(part, ids, i);
  if (special) {
    span.classList.add("special");
    putText(span, text || "id " + ids[i]);
  } else if (text) {
    putText(span, text);
  } else {
    span.append(element("span", "unseen", bytes ?? "\u2205"));
  }
  const reward = part.token_rewards?.[i];
  if (reward !== undefined) span.append(element("span", "earned", signed(reward, 2)));
  return span;
}

const owners = new WeakMap(); // the element of a part -> its row and part

function tokenFacts(row, part, i) {
  const { ids, order, logProbs, refLogProbs, newLogProbs, advantages, versions } = numbers(row, part);
  const [, piece, special, bytes] = entry(ids[i]);
  const place = order[i];
  const logProb = logProbs?.[place];
  const facts = [
    ["token", `${i} of ${ids.length}`],
    ["id", `${ids[i]}${special ? (piece ? ", special" : ", not in the vocabulary") : ""}`],
    ["text", JSON.stringify(tokenText(part, ids, i))],
  ];
  if (typeof piece === "string") facts.push(["piece", piece]);
  if (bytes) facts.push(["bytes", bytes]);
  if (place < 0) return [...facts, ["mask", "context: not sampled"]];
  facts.push(["mask", "action: sampled by the policy"]);
  if (logProb !== undefined) {
    facts.push(["log-prob", decimals(logProb, 4)], ["probability", decimals(Math.exp(logProb), 4)]);
  }
  if (newLogProbs) {
    facts.push(["log-prob of the trained model", decimals(newLogProbs[place], 4)]);
    facts.push(["change of the log-prob", signed(newLogProbs[place] - logProb, 4)]);
  }
  if (refLogProbs) {
    facts.push(["reference log-prob", decimals(refLogProbs[place], 4)]);
    facts.push(["log-ratio to reference", signed(logProb - refLogProbs[place], 4)]);
  }
  if (advantages) facts.push(["advantage", signed(advantages[place], 4)]);
  const reward = part.token_rewards?.[i];
  if (reward !== undefined) facts.push(["token reward", signed(reward, 4)]);
  const version = versions?.[place] ?? row.version;
  if (version !== null) facts.push(["policy version", String(version)]);
  return facts;
}

function factList(facts) {
  const list = element("dl", "facts");
  for (const [name, value] of facts) {
    list.append(putText(element("dt"), name), putText(element("dd"), value));
  }
  return list;
}

const tip = byId("tip");
let tipOf = null;

function showTip(span) {
  const { row, part } = owners.get(span.closest(".part"));
  hideTip();
  tip.replaceChildren(factList(tokenFacts(row, part, Number(span.dataset.i))));
  tipOf = span;
  span.setAttribute("aria-describedby", "tip");
  placeTip();
}

// Place the tooltip next to its token, and hide it when the token scrolls out of view.
function placeTip() {
  if (!tipOf) return;
  tip.hidden = false;
  const at = tipOf.getClientRects()[0] ?? tipOf.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const frame = transcript.getBoundingClientRect();
  if (at.bottom < frame.top || at.top > frame.bottom) return hideTip();
  const below = at.bottom + 6 + size.height <= innerHeight;
  const top = below ? at.bottom + 6 : Math.max(4, at.top - 6 - size.height);
  const left = Math.max(4, Math.min(at.left, document.documentElement.clientWidth - size.width - 4));
  tip.style.setProperty("top", `${top}px`);
  tip.style.setProperty("left", `${left}px`);
}

function hideTip() {
  tipOf?.removeAttribute("aria-describedby");
  tipOf = null;
  tip.hidden = true;
}
