
// List of conversations (filters, order, groups), URL fragment, keyboard and start of the page.

const rows = data.rows;
const groups = new Map(); // group key -> rows
const groupKey = (row) => (row.group === null ? `row ${row.place}` : row.group);
for (const row of rows) groups.set(groupKey(row), [...(groups.get(groupKey(row)) ?? []), row]);
const groupOf = (row) => groups.get(groupKey(row));
const hasGroups = groups.size < rows.length;
const hasAdvantages = rows.some((row) => row.advantage !== null);
const earned = rows.map((row) => row.reward).filter((reward) => reward !== null);
const [lowestReward, highestReward] = [Math.min(0, ...earned), Math.max(0, ...earned)];

const COLUMNS = [
  ["#", "place", (row) => row.place, (row) => String(row.place)],
  ["conversation", "prompt", (row) => row.prompt, null],
  ["reward", "reward", (row) => row.reward, (row) => decimals(row.reward, 2)],
  ["adv.", "advantage", (row) => row.advantage, (row) => (row.advantage === null ? "\u2013" : signed(row.advantage, 2))],
  ["turns", "turns", (row) => row.turns, (row) => decimals(row.turns)],
  ["calls", "calls", (row) => row.calls, (row) => decimals(row.calls) + (row.errors ? " !" : "")],
  ["tokens", "tokens", (row) => row.actions, (row) => String(row.actions)],
  ["ended", "stop", (row) => row.stop, (row) => row.stop ?? "\u2013"],
].filter(([, key]) => key !== "advantage" || hasAdvantages);

const narrow = matchMedia("(max-width: 56rem)"); // as in page.css, which hides columns
const columnsSeen = () => COLUMNS.length - (narrow.matches ? 4 : 0);

let order = { key: "place", descending: false };
let selected = null;
let view = "";
let visible = rows;

function snippet(row) {
  const cell = element("td", "snippet");
  const link = element("a");
  link.href = `#row=${row.place}`;
  link.append(putText(element("span", "asked"), row.prompt.trim()));
  const answer = element("span", "answered");
  if (row.kind) answer.append(element("span", "kind", row.kind));
  putText(answer, row.answer.replace(/\s+/g, " ").trim() || "(empty)");
  link.append(answer);
  cell.append(link);
  return cell;
}

function listElement(row) {
  if (row.element) return row.element;
  const made = element("tr");
  for (const [, key, , text] of COLUMNS) {
    const cell = text === null ? snippet(row) : element("td", key, text(row));
    if (key === "reward" && row.reward !== null && highestReward > lowestReward) {
      const share = (row.reward - lowestReward) / (highestReward - lowestReward);
      cell.style.setProperty("--share", `${(100 * share).toFixed(0)}%`);
    }
    if (key === "calls" && row.errors) cell.title = `${row.errors} tool errors`;
    made.append(cell);
  }
  made.addEventListener("click", (event) => {
    const onLink = event.target.closest("a");
    if (event.ctrlKey || event.metaKey || event.shiftKey || (!onLink && getSelection().toString())) return;
    event.preventDefault();
    show(row, view);
  });
  row.element = made;
  return made;
}

function groupElement(row) {
  const members = groupOf(row);
  const rewards = members.map((member) => member.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const cell = element("th", "group");
  cell.colSpan = columnsSeen();
  cell.scope = "rowgroup";
  cell.append(putText(element("span", "asked"), row.prompt.trim()));
  cell.append(element("span", "of-group", `group ${row.group}, ${members.length} rows, mean ${decimals(mean, 2)}`));
  const made = element("tr");
  made.append(cell);
  return made;
}

function passes(row) {
  const words = byId("search").value.toLowerCase();
  const [lowest, highest] = [byId("lowest"), byId("highest")].map((input) => input.valueAsNumber);
  const chosen = (id, value) => byId(id).value === "" || byId(id).value === value;
  return (
    (Number.isNaN(lowest) || (row.reward !== null && row.reward >= lowest)) &&
    (Number.isNaN(highest) || (row.reward !== null && row.reward <= highest)) &&
    chosen("stop", row.stop ?? "") &&
    chosen("task", row.task ?? "") &&
    chosen("kind", row.kind === "" ? "" : row.kind === "greedy" ? "greedy" : "sampled") &&
    (!byId("errors").checked || row.errors > 0) &&
    (words === "" || wholeText(row).includes(words))
  );
}

function compare(a, b) {
  if (order.key === "place") {
    const before = hasGroups ? groupOf(a)[0].place - groupOf(b)[0].place : 0;
    return (before || a.place - b.place) * (order.descending ? -1 : 1);
  }
  const value = COLUMNS.find(([, key]) => key === order.key)[2];
  const [x, y] = [value(a), value(b)];
  if (x === null || y === null) return (x === null) - (y === null) || a.place - b.place; // unknown values last
  const before = typeof x === "string" ? x.localeCompare(y) : x - y;
  return (order.descending ? -before : before) || a.place - b.place;
}

function renderList() {
  visible = rows.filter(passes).sort(compare);
  const grouped = hasGroups && order.key === "place";
  const shown = document.createDocumentFragment();
  visible.forEach((row, i) => {
    if (grouped && (i === 0 || groupKey(visible[i - 1]) !== groupKey(row))) shown.append(groupElement(row));
    shown.append(listElement(row));
  });
  if (!visible.length) {
    const cell = element("td", "nothing", "No conversation matches the filters.");
    cell.colSpan = columnsSeen();
    const line = element("tr");
    line.append(cell);
    shown.append(line);
  }
  byId("list").replaceChildren(shown);
  byId("list").classList.toggle("grouped", grouped);
  const rewards = visible.map((row) => row.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const left = data.total > rows.length ? ` (${data.total - rows.length} more were not written)` : "";
  byId("found").textContent =
    `${visible.length} of ${rows.length} conversations${left}` + (rewards.length ? `, mean reward ${decimals(mean)}` : "");
  for (const head of byId("heads").children) {
    const sorted = head.dataset.key === order.key;
    head.setAttribute("aria-sort", sorted ? (order.descending ? "descending" : "ascending") : "none");
  }
}

function show(row, wanted, { focus = false } = {}) {
  selected?.element?.removeAttribute("aria-current");
  const changed = row !== selected || wanted !== view;
  selected = row;
  view = wanted;
  const made = listElement(row);
  made.setAttribute("aria-current", "true");
  made.scrollIntoView({ block: "nearest" });
  if (focus) made.querySelector("a").focus();
  if (changed) renderTranscript(row, wanted);
  const address = `#row=${row.place}${wanted ? "&view=" + wanted : ""}`;
  if (location.hash !== address) history.replaceState(null, "", address);
  document.body.dataset.pane = "transcript";
}

function move(step, focus) {
  const at = visible.indexOf(selected);
  const next = visible[at < 0 ? 0 : Math.min(Math.max(at + step, 0), visible.length - 1)];
  if (next) show(next, view, { focus });
}

function followAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const row = rows[Number(asked.get("row") ?? NaN)];
  const wanted = asked.get("view") === "group" ? "group" : "";
  if (row) show(row, groupOf(row).length > 1 ? wanted : "");
  return Boolean(row);
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  g: () => selected && groupOf(selected).length > 1 && show(selected, view ? "" : "group"),
  "/": () => byId("search").focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return hideTip();
  if (event.target.matches("input, select, textarea")) return;
  const vertical = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (vertical && event.target.closest("#list")) move(vertical, true);
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

function fillSelect(id, all, values) {
  const select = byId(id);
  select.append(new Option(all, ""), ...values.map((value) => new Option(plainText(value), value)));
  select.hidden = values.length < 2;
}

const distinct = (values) => [...new Set(values)].filter((value) => value !== null && value !== "").sort();

const LEGENDS = {
  log_probs: ["probability of sampled tokens", ["p0", "\u2265 0.9"], ["p2", "\u2265 0.5"], ["p4", "\u2265 0.1"], ["p6", "< 0.01"]],
  advantage: ["advantage", ["down4", "lowest"], ["down2", "\u2212"], ["even", "0"], ["up2", "+"], ["up4", "highest"]],
  change: ["change of the log-prob", ["fall4", "\u2264 \u22121"], ["fall2", "\u2264 \u22120.1"], ["rise2", "\u2265 0.1"], ["rise4", "\u2265 1"]],
  mask: ["", ["", "sampled"]],
};

function colorBy(name) {
  document.body.dataset.color = name;
  const [label, ...steps] = LEGENDS[name];
  const samples = steps.map(([shade, text]) => element("span", `shade action ${shade}`, text));
  byId("legend").replaceChildren(...samples);
  byId("legend").setAttribute("aria-label", label || "sampled tokens are marked");
}

function start() {
  document.title = plainText(data.title);
  byId("title").replaceChildren();
  putText(byId("title"), data.title);
  for (const [name, key] of COLUMNS) {
    const head = element("th", key);
    head.dataset.key = key;
    head.scope = "col";
    head.append(button(name, () => {
      const first = ["place", "prompt", "stop"].includes(key) ? false : true; // numbers in descending order first
      order = order.key === key ? { key, descending: !order.descending } : { key, descending: first };
      renderList();
    }));
    byId("heads").append(head);
  }
  fillSelect("stop", "any stop reason", distinct(rows.map((row) => row.stop)));
  fillSelect("task", "any task", distinct(rows.map((row) => row.task)));
  fillSelect("kind", "greedy and sampled", distinct(rows.map((row) => row.kind && (row.kind === "greedy" ? "greedy" : "sampled"))));
  byId("errors-label").hidden = !rows.some((row) => row.errors);
  const settings = flatten(data.settings);
  byId("settings").querySelector(".sheet").append(factList(settings));
  byId("settings").hidden = !settings.length;
  byId("color").addEventListener("change", (event) => colorBy(event.target.value));
  const hasChanges = rows.some((row) => row.parts.some((part) => part.new_log_probs && part.log_probs));
  if (!hasChanges) byId("color").options[2].remove();
  if (!hasAdvantages) byId("color").options[1].remove();
  byId("scheme").addEventListener("change", (event) =>
    document.documentElement.style.setProperty("color-scheme", event.target.value),
  );
  let waiting = 0;
  byId("filters").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(renderList, 120);
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(renderList));
  byId("to-list").addEventListener("click", () => (document.body.dataset.pane = "list"));
  addEventListener("hashchange", followAddress);
  narrow.addEventListener("change", renderList);
  colorBy("log_probs");
  renderList();
  if (!followAddress()) {
    show(visible[0], "");
    document.body.dataset.pane = "list"; // a narrow screen starts with the list
  }
}

// Flatten nested settings to dotted names.
function flatten(settings, before = "") {
  return Object.entries(settings).flatMap(([name, value]) => {
    const inner = value !== null && typeof value === "object" && !Array.isArray(value);
    return inner ? flatten(value, `${before}${name}.`) : [[before + name, valueText(value)]];
  });
}

start();
