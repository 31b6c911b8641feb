
// Transcript: one conversation as blocks by role, or the conversations of a group side by side.

const CLAMP = 320; // height in px to which context blocks are cut at first

function blockElement(row, part, index, turn) {
  const [start, role, label, isError] = part.blocks[index];
  const end = part.blocks[index + 1]?.[0] ?? part.tokens;
  const { order } = numbers(row, part);
  const actions = order.subarray(start, end).filter((place) => place >= 0).length;
  const sampled = actions > 0;
  const block = element("section", `block ${sampled ? "sampled" : "given"}${isError ? " failed" : ""}`);
  block.dataset.role = role;
  const head = element("div", "block-head");
  head.append(element("h3", "", role + (sampled ? `, turn ${turn}` : "")));
  if (label) head.append(putText(element("span", "name"), label));
  if (isError) head.append(element("span", "badge", "error"));
  const others = end - start - actions;
  const size = !sampled ? `${others} context tokens` : `${actions} sampled${others ? ` + ${others} template` : ""}`;
  head.append(element("span", "size", size));
  const body = element("div", "text");
  const calls = part.calls.filter(([from]) => from >= start && from < end);
  let into = body;
  const images = part.images ?? [];
  if (start === 0) for (const [, to, name] of images) if (to === 0) body.append(pictureElement(name));
  for (let i = start; i < end; i++) {
    const image = images.find(([from, to]) => from === i && to > i);
    if (image) {
      body.append(pictureElement(image[2], `${image[1] - i} tokens`));
      i = image[1] - 1;
      continue;
    }
    const call = calls.find(([from]) => from === i);
    if (call) {
      into = element("span", "call");
      into.append(element("span", "call-label", "tool call"));
      body.append(into);
    }
    into.append(tokenSpan(row, part, i));
    if (into !== body && calls.some(([, to]) => to === i + 1)) into = body;
  }
  block.append(head, body);
  return block;
}

// Return a thumbnail, or the label of an image that is missing or changed.
function pictureElement(name, size = "") {
  const { label, picture } = data.images[name];
  const made = element("span", "picture");
  if (picture) {
    const image = element("img");
    image.src = picture;
    image.alt = label;
    made.append(image);
  }
  made.append(element("span", "picture-label", `${picture ? label : label + ", cannot be shown"}${size && ", " + size}`));
  return made;
}

// Return the blocks of a part; without the prompt, they start with the first sampled block.
function partElement(row, part, { prompt = true, answer = true } = {}) {
  const made = element("div", "part");
  owners.set(made, { row, part });
  const firstAction = part.mask[0]?.[0] ?? part.tokens;
  let turn = 0;
  part.blocks.forEach(([start], index) => {
    const end = part.blocks[index + 1]?.[0] ?? part.tokens;
    const sampled = part.mask.some(([from]) => from >= start && from < end);
    if (sampled) turn++;
    const ofPrompt = end <= firstAction;
    if (ofPrompt ? prompt : answer) made.append(blockElement(row, part, index, turn));
  });
  return made;
}

// Cut long context, such as a web page from a tool, behind a button.
function clampBlocks(root) {
  for (const body of root.querySelectorAll(".given > .text")) {
    if (body.scrollHeight <= CLAMP * 1.3) continue;
    body.classList.add("clamped");
    const more = button(`Show all`, () => {
      const clamped = body.classList.toggle("clamped");
      more.textContent = clamped ? "Show all" : "Show less";
      more.setAttribute("aria-expanded", String(!clamped));
    }, "more");
    more.setAttribute("aria-expanded", "false");
    body.after(more);
  }
}

function tile(name, value, title = "") {
  const made = element("div", "tile");
  made.append(element("span", "tile-name", name), putText(element("span", "tile-value"), value));
  if (title) made.title = title;
  return made;
}

function meanLogProb(row) {
  let sum = 0;
  let count = 0;
  for (const part of row.parts) for (const x of numbers(row, part).logProbs ?? []) (sum += x), count++;
  return count ? sum / count : null;
}

function advantageText(row) {
  const values = row.parts.filter((part) => part.advantages).flatMap((part) => [...numbers(row, part).advantages]);
  if (!values.length) return signed(row.advantage);
  const [least, most] = values.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  return `${signed(least, 2)} to ${signed(most, 2)}`;
}

const rowName = (row) => `#${row.place}${row.kind ? " " + row.kind : ""}`;
const valueText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function summary(row) {
  const tiles = element("div", "tiles");
  tiles.append(tile("reward", decimals(row.reward)));
  if (hasAdvantages) tiles.append(tile("advantage", advantageText(row)));
  tiles.append(tile("ended", row.stop ?? "\u2013", data.stop_reasons[row.stop] ?? ""));
  tiles.append(tile("turns", decimals(row.turns)), tile("tool calls", decimals(row.calls)));
  tiles.append(tile("tokens", `${row.actions} of ${row.tokens}`, "tokens sampled by the policy, of all tokens"));
  tiles.append(tile("mean log-prob", decimals(meanLogProb(row))));
  if (row.version !== null) tiles.append(tile("policy version", String(row.version)));
  return tiles;
}

function details(row) {
  const names = row.rewards.map((_, i) => data.reward_names[i] ?? `reward ${i + 1}`);
  const facts = row.rewards.map((value, i) => [names[i], value === null ? "abstained" : decimals(value)]);
  if (row.task !== null) facts.push(["task", row.task]);
  if (row.prompt_id !== null) facts.push(["prompt id", String(row.prompt_id)]);
  for (const [name, value] of Object.entries(row.columns)) facts.push([name, valueText(value)]);
  return facts.length ? factList(facts) : "";
}

function conversation(row) {
  const made = document.createDocumentFragment();
  const head = element("div", "transcript-head");
  const group = row.group === null ? "" : `, group ${row.group}`;
  head.append(element("h2", "", `Conversation ${rowName(row)}${group}`));
  const members = groupOf(row);
  if (members.length > 1) head.append(button(`Whole group of ${members.length}`, () => show(row, "group")));
  made.append(head, summary(row), details(row));
  row.parts.forEach((part, k) => {
    if (row.parts.length > 1) made.append(element("h2", "sample", `Sample ${k + 1} of ${row.parts.length}`));
    made.append(partElement(row, part));
  });
  return made;
}

function groupView(row) {
  const made = document.createDocumentFragment();
  const members = groupOf(row);
  const head = element("div", "transcript-head");
  head.append(element("h2", "", `Group ${row.group}, ${members.length} conversations`));
  head.append(button(`Back to ${rowName(row)}`, () => show(row, "")));
  made.append(head, partElement(row, row.parts[0], { answer: false }));
  const cards = element("div", "cards");
  for (const member of members) {
    const card = element("section", "card");
    if (member === row) card.setAttribute("aria-current", "true");
    const link = element("a", "", `Conversation ${rowName(member)}`);
    link.href = `#row=${member.place}`;
    const heading = element("h3");
    heading.append(link);
    const facts = [["reward", decimals(member.reward)]];
    if (hasAdvantages) facts.push(["advantage", advantageText(member)]);
    card.append(heading, factList([...facts, ["ended", member.stop ?? "\u2013"], ["tokens", String(member.actions)]]));
    for (const part of member.parts) card.append(partElement(member, part, { prompt: false }));
    cards.append(card);
  }
  made.append(cards);
  return made;
}

const transcript = byId("transcript");

transcript.addEventListener("pointerover", (event) => {
  const span = event.target.closest(".token");
  if (span) showTip(span);
  else hideTip();
});
transcript.addEventListener("pointerleave", hideTip);
addEventListener("scroll", placeTip, { passive: true, capture: true });
addEventListener("resize", placeTip);
transcript.addEventListener("focusin", (event) => {
  if (!event.target.matches(".token")) return;
  transcript.querySelector('.token[tabindex="0"]')?.setAttribute("tabindex", "-1");
  event.target.tabIndex = 0; // the Tab key returns here
  showTip(event.target);
});
transcript.addEventListener("focusout", hideTip);
transcript.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !event.target.matches(".token")) return;
  const spans = [...transcript.querySelectorAll(".token")];
  const next = spans[spans.indexOf(event.target) + step];
  if (!next) return;
  event.preventDefault();
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
  showTip(next);
});

function renderTranscript(row, view) {
  hideTip();
  transcript.replaceChildren(view === "group" ? groupView(row) : conversation(row));
  transcript.scrollTop = 0;
  clampBlocks(transcript);
  transcript.querySelector(".token")?.setAttribute("tabindex", "0");
}
