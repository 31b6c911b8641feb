
// Sections of the live page but the charts: health, runs, evaluations, waits, samples, settings.

const byId = (id) => document.getElementById(id);

function fill(section, title, ...content) {
  section.hidden = content.length === 0;
  section.replaceChildren(...(content.length ? [element("h2", "", title), ...content] : []));
}

function pairs(entries) {
  const list = element("dl", "pairs");
  for (const [name, value] of entries) {
    const cell = element("dd");
    cell.append(value instanceof Node ? value : String(value));
    list.append(element("dt", "", name), cell);
  }
  return list;
}

function grid(heads, rows) {
  const table = element("table", "grid");
  const put = (tag, cells) => {
    const row = element("tr");
    for (const cell of cells) {
      const made = element(tag);
      made.append(cell instanceof Node ? cell : String(cell));
      row.append(made);
    }
    table.append(row);
  };
  put("th", heads);
  for (const row of rows) put("td", row);
  const scroll = element("div", "scroll");
  scroll.append(table);
  return scroll;
}

/** Empty the first cell of rows that begin as the row before. */
function withoutRepeats(rows) {
  return rows.map(([first, ...rest], i) => [i && rows[i - 1][0] === first ? "" : first, ...rest]);
}

function formatDuration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function interval(values) {
  if (!values) return "\u2013";
  const [mean, low, high] = values;
  const text = formatNumber(mean);
  return low === null || high === null ? text : `${text} (${formatNumber(low)} to ${formatNumber(high)})`;
}

const several = () => runs.length > 1;
const ofRun = (run) => (several() ? `${run.name}: ` : "");

function showHealth() {
  const notes = [];
  for (const run of runs) {
    for (const event of run.sections.health) {
      const over = event.cleared !== null;
      const note = element("div", `note ${over ? "over" : event.severity}`);
      const when = over ? `steps ${event.step} to ${event.cleared}` : `since step ${event.step}`;
      note.append(element("span", "badge", over ? "over" : event.severity));
      note.append(`${ofRun(run)}${event.rule}, ${when}. ${event.sentence} `, element("span", "remedy", event.remedy));
      const evidence = Object.entries(event.evidence).map(([name, value]) => `${name} ${formatNumber(value)}`);
      if (evidence.length) note.append(element("div", "faint", evidence.join(", ")));
      notes.push([over, note]);
    }
    for (const fault of run.sections.faults) notes.push([false, element("div", "note warn", `${ofRun(run)}${fault}.`)]);
  }
  const now = notes.filter(([over]) => !over).map(([, note]) => note);
  const past = notes.filter(([over]) => over).map(([, note]) => note);
  if (past.length) {
    const folded = element("details");
    folded.open = byId("health").querySelector("details")?.open ?? false;
    folded.append(element("summary", "faint", past.length === 1 ? "1 event that is over" : `${past.length} events that are over`), ...past);
    now.push(folded);
  }
  fill(byId("health"), "Health", ...now);
}

function showRuns() {
  byId("runs").replaceChildren(...runs.map((run) => run.card));
}

/** Write what changes with each step into the card of a run. */
function updateRun(run, place) {
  const { facts, sections } = run;
  const name = element("h3");
  if (several()) {
    const box = element("input");
    [box.type, box.checked] = ["checkbox", !run.hidden];
    box.setAttribute("aria-label", `Show ${run.name}`);
    box.addEventListener("change", () => {
      run.hidden = !box.checked;
      drawCharts();
    });
    const swatch = element("span", "swatch");
    const colors = isDark() ? DARK : LIGHT;
    swatch.style.background = colors[place % colors.length];
    name.append(box, swatch);
  }
  name.append(run.name);
  const rows = Object.entries(sections.facts);
  if (facts.step !== null) {
    const left = facts.left ? `, about ${formatDuration(facts.left)} left` : "";
    rows.push(["Step", facts.total ? `${formatSteps(facts.step)} of ${formatSteps(facts.total)}${left}` : facts.step]);
  }
  if (facts.reward !== null) rows.push(["Reward", formatNumber(facts.reward)]);
  if (facts.seconds !== null) {
    const cpu = facts.cpu === undefined ? "" : `, ${formatDuration(facts.cpu)} of CPU`;
    rows.push(["Time", `${formatDuration(facts.wall)} of steps${cpu}, ${formatDuration(facts.seconds)} a step`]);
  }
  if (facts.rate !== undefined) rows.push(["Sampling", `${formatSteps(Math.round(facts.rate))} tokens/s`]);
  if (live && facts.age !== null) rows.push(["Last entry", `${formatDuration(facts.age)} ago`]);
  const card = [name];
  if (facts.step === null) {
    card.push(element("p", "faint", sections.evaluations.length ? "An evaluation, without steps." : "No step so far."));
  }
  if (facts.total && facts.step !== null) {
    const bar = element("progress");
    [bar.max, bar.value] = [facts.total, Math.max(0, facts.step)];
    bar.setAttribute("aria-label", "Steps done");
    card.push(bar);
  }
  card.push(pairs(rows));
  for (const sentence of sections.verdict) card.push(element("p", "verdict", sentence));
  if (sections.links.length) {
    const links = element("div", "links");
    sections.links.slice(0, 12).forEach(([label, address]) => links.append(link(run, address, label)));
    card.push(links);
  }
  run.card.replaceChildren(...card);
}

function link(run, address, label) {
  const made = element("a", "", label);
  made.href = run.base + address;
  [made.target, made.rel] = ["_blank", "noopener noreferrer"];
  return made;
}

function showEvaluations() {
  const found = runs.flatMap((run) => run.sections.evaluations.map((e) => [run, e]));
  const metrics = [...new Set(found.map(([, e]) => e.name))];
  const rows = metrics.flatMap((metric) =>
    found
      .filter(([, e]) => e.name === metric)
      .map(([run, e]) => [
        metric,
        ...(several() ? [run.name] : []),
        e.first ? `${interval(e.first)} at step ${formatSteps(e.steps[0])}` : "\u2013",
        e.steps ? `${interval(e.last)} at step ${formatSteps(e.steps[1])}` : interval(e.last),
        e.difference ? interval(e.difference) : "\u2013",
      ]),
  );
  const heads = ["metric", ...(several() ? ["run"] : []), "first", "last", "difference"];
  const note = element("p", "faint", "In parentheses: 95 % intervals over the prompts; that of the difference takes both as independent.");
  fill(byId("evaluations"), "Held-out evaluation", ...(rows.length ? [grid(heads, withoutRepeats(rows)), note] : []));
}

/** Show what each run waits for: a column for each run. */
function showWaits() {
  const timed = runs.filter((run) => run.sections.waits?.rows.length);
  const [first] = timed;
  if (!first) return fill(byId("waits"), "Who waits for whom");
  const kinds = [...new Set(timed.flatMap((run) => run.sections.waits.rows.map(([who]) => who)))];
  const rows = kinds.flatMap((kind) => {
    const values = timed.map((run) => new Map(run.sections.waits.rows.filter(([who]) => who === kind).map((row) => row.slice(1))));
    const states = [...new Set(values.flatMap((value) => [...value.keys()]))];
    return states.map((state) => [kind, state, ...values.map((value) => value.get(state) ?? "\u2013")]);
  });
  const heads = [...first.sections.waits.heads.slice(0, 2), ...(several() ? timed.map((run) => run.name) : first.sections.waits.heads.slice(2))];
  const told = ({ sections }) => sections.verdict.some((sentence) => sentence === sections.waits.sentence);
  const sentences = timed.filter((run) => !told(run)).map((run) => element("p", "", ofRun(run) + run.sections.waits.sentence));
  fill(byId("waits"), "Who waits for whom", ...sentences, grid(heads, withoutRepeats(rows)));
}

function showSamples() {
  const content = [];
  for (const run of runs) {
    for (const { table, step, rows } of run.sections.samples) {
      content.push(element("h3", "", `${ofRun(run)}${table}${step === null ? "" : `, step ${formatSteps(step)}`}`));
      const cards = element("div", "samples");
      for (const { columns, link: address } of rows) {
        const card = element("div", "sample");
        card.append(pairs(Object.entries(columns).map(([name, text]) => [name, element("div", "text", text)])));
        if (address) card.append(link(run, address, "transcript, token by token"));
        cards.append(card);
      }
      content.push(cards);
    }
  }
  fill(byId("samples"), "Newest samples", ...content);
}

/** Show the settings that differ between the runs, then all. */
function showSettings() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.sections.settings)))];
  const value = (run, name) => (Object.hasOwn(run.sections.settings, name) ? run.sections.settings[name] : "\u2013");
  const row = (name) => [name, ...runs.map((run) => value(run, name))];
  const differs = names.filter((name) => new Set(runs.map((run) => value(run, name))).size > 1);
  const lacking = (name) => runs.filter((run) => !Object.hasOwn(run.sections.settings, name)).length;
  differs.sort((one, other) => lacking(one) - lacking(other)); // those that all runs have come first
  const heads = ["setting", ...runs.map((run) => (several() ? run.name : "value"))];
  const content = differs.length ? [element("h3", "", "Settings that differ"), grid(heads, differs.map(row))] : [];
  if (names.length) {
    const all = element("details");
    all.append(element("summary", "", `All ${names.length} settings`), grid(heads, names.map(row)));
    content.push(all);
  }
  fill(byId("settings"), "Settings", ...content);
}
