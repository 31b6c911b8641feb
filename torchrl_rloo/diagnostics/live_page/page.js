
// Live page: data of the file or from the server, charts, and the order of things.

const INTERVAL = 2000; // milliseconds between two requests
const LONGEST = 30000; // after failed requests
const page = JSON.parse(byId("data").textContent);
const live = page.live;

let runs = []; // {name, base, curves, detail, facts, sections, card, hidden, generation, width, next}
let sections = null;
let stamp = "";
let failures = 0;
let panels = [];
let groups = [];
let definitions = new Map();

function receive(answer) {
  if (answer.sections) [sections, stamp] = [answer.sections, answer.stamp];
  if (runs.length !== answer.runs.length) {
    runs = answer.runs.map((_, place) => ({
      base: live ? `runs/${place}/` : page.bases[place],
      curves: new Curves(),
      card: element("article", "run"),
      hidden: false,
    }));
  }
  answer.runs.forEach((state, place) => {
    const run = runs[place];
    Object.assign(run, { facts: state.facts, generation: state.generation, next: state.next });
    run.curves.merge(state.bins);
    run.sections = sections.runs[place];
    run.name = run.sections.name;
  });
  if (answer.sections) {
    showRuns();
    for (const show of [showHealth, showEvaluations, showWaits, showSamples, showSettings]) show();
    arrangeCharts();
  }
  runs.forEach(updateRun);
  drawCharts();
}

/** Create the charts that the sections name, and keep those that stay. */
function arrangeCharts() {
  definitions = new Map(Object.entries(sections.definitions));
  const key = (panel) => JSON.stringify(panel);
  const had = new Map(panels.map((chart) => [key(chart.panel), chart]));
  panels = sections.panels.map((panel) => {
    const kept = had.get(key(panel));
    had.delete(key(panel));
    return kept ?? new Chart(panel, definitions);
  });
  for (const chart of had.values()) chart.remove();
  byId("charts").replaceChildren(...panels.map((chart) => chart.card));
  arrangeOthers();
}

/** Group all other metrics by prefix; a group draws its charts when it is opened. */
function arrangeOthers() {
  const open = new Set(groups.filter((group) => group.box.open).map((group) => group.title));
  for (const group of groups) group.charts.forEach((chart) => chart.remove());
  groups = sections.others.map(({ title, names }) => {
    const group = { title, names, charts: [], box: element("details", "group"), grid: element("div", "charts") };
    group.box.append(element("summary", "", `${title} (${names.length})`), group.grid);
    group.box.open = open.has(title);
    group.box.addEventListener("toggle", () => openGroup(group));
    openGroup(group);
    return group;
  });
  const constants = Object.entries(sections.constants);
  const boxes = groups.map((group) => group.box);
  if (constants.length) {
    const box = element("details", "group");
    box.open = byId("groups").querySelector("details.constant")?.open ?? false;
    box.classList.add("constant");
    const rows = constants.map(([name, values]) => [name, ...values.map(formatNumber)]);
    const heads = ["metric", ...runs.map((run) => (several() ? run.name : "value"))];
    box.append(element("summary", "", `constant so far (${rows.length})`), grid(heads, rows));
    boxes.push(box);
  }
  byId("groups").replaceChildren(...boxes);
  byId("others").hidden = boxes.length === 0;
  filterGroups();
}

function openGroup(group) {
  if (!group.box.open || group.charts.length) return;
  group.charts = group.names.map(
    (name) => new Chart({ title: name, unit: "", names: [name], points: false, smoothed: false, share: false }, definitions),
  );
  group.grid.replaceChildren(...group.charts.map((chart) => chart.card));
  group.charts.forEach((chart) => chart.update(shownRuns()));
  filterGroups();
}

function filterGroups() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const group of groups) {
    const matches = (name) => name.toLowerCase().includes(wanted);
    group.box.hidden = !group.names.some(matches);
    if (wanted && !group.box.hidden && !group.box.open) group.box.open = true;
    for (const chart of group.charts) chart.card.hidden = !matches(chart.panel.title);
  }
}

/** Return the runs with the finer curves of the zoomed steps, if they are there. */
function shownRuns() {
  return runs.map((run) => (zoom && run.detail ? { ...run, curves: run.detail } : run));
}

function drawCharts() {
  setSpan(runs);
  for (const chart of charts) chart.update(shownRuns());
  filterGroups();
}

let asked = 0;

async function loadDetail(steps) {
  const number = ++asked;
  const coarse = runs.some((run) => run.curves.width > 1);
  if (!steps || !live || !coarse) {
    runs.forEach((run) => (run.detail = null));
    return drawCharts();
  }
  try {
    const answer = await request({ low: Math.max(0, Math.floor(steps[0])), high: Math.max(0, Math.ceil(steps[1])) });
    if (number !== asked) return;
    answer.runs.forEach(({ bins }, place) => {
      runs[place].detail = new Curves();
      runs[place].detail.merge(bins);
    });
    drawCharts();
  } catch {
    // The next request of the page tells that the server is gone
  }
}

async function request(known) {
  const response = await fetch(`data?known=${encodeURIComponent(JSON.stringify(known))}`);
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

function tell(text, lost = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("lost", lost);
}

async function poll() {
  let wait = INTERVAL;
  try {
    if (!document.hidden) {
      const known = { sections: stamp, runs: runs.map(({ generation, curves, next }) => ({ generation, width: curves.width, next })) };
      const answer = await request(known);
      receive(answer);
      if (zoom) await loadDetail(zoom);
      failures = 0;
      wait = answer.pending ? 0 : INTERVAL;
      tell(answer.pending ? `reading, ${Math.ceil(answer.pending / 1e6)} MB left` : "live");
    }
  } catch {
    failures += 1;
    wait = Math.min(LONGEST, INTERVAL * failures);
    tell("no answer from torchrl-rloo watch; trying again", true);
  }
  document.documentElement.dataset.polls = Number(document.documentElement.dataset.polls ?? 0) + 1;
  setTimeout(poll, wait);
}

onZoom = loadDetail;
followScheme();
byId("scheme").addEventListener("change", () => requestAnimationFrame(() => runs.forEach(updateRun)));
byId("filter").addEventListener("input", filterGroups);
if (live) poll();
else {
  receive(page.data);
  tell("saved");
}
