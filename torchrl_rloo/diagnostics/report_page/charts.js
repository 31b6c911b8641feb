
// Charts of metrics: unpacking of bins, curves with bounds, hover and zoom in all charts at once.

const LIGHT = ["#1f5fa8", "#c8553d", "#2f7d4f", "#8a5fb0", "#8f6c12", "#4a4a4a", "#0f7a80", "#b3386f"];
const DARK = ["#6ea8ef", "#f0907a", "#6fcf97", "#c39be6", "#e0b84a", "#c0c4cc", "#4fc7cf", "#ef86b5"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [1, 2]];
const HEIGHT = 230;
const SEARCH = 4000; // points looked through for the value nearest to the pointer

const charts = new Set();
let zoom = null; // [first, last] step shown, null for all
let span = [0, 1]; // first and last step of all runs
let onZoom = () => {};

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function formatNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("-", "\u2212");
  const text = size >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
  return text.replace("-", "\u2212");
}

function unpack(text, Kind) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return Array.from(new Kind(bytes.buffer));
}

/** Values of a run's metrics, merged from the increments of the server. */
class Curves {
  constructor() {
    this.series = new Map(); // name -> {x, mean, low, high}
    this.width = 1;
  }

  merge(bins) {
    const xs = bins.xs.map((text) => unpack(text, Float64Array));
    if (bins.start === null) this.series.clear();
    this.width = bins.width;
    for (const [name, [place, mean, low, high]] of Object.entries(bins.series)) {
      const fresh = { x: xs[place], mean: unpack(mean, Float32Array) };
      fresh.low = low === undefined ? fresh.mean : unpack(low, Float32Array);
      fresh.high = high === undefined ? fresh.mean : unpack(high, Float32Array);
      const had = this.series.get(name);
      this.series.set(name, had && bins.start !== null ? extend(had, fresh, bins.start) : fresh);
    }
  }

  /** Return first and last position, or null without values. */
  span() {
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of this.series.values()) {
      low = Math.min(low, x[0]);
      high = Math.max(high, x[x.length - 1]);
    }
    return low <= high ? [low, high] : null;
  }
}

function extend(had, fresh, start) {
  let kept = had.x.length;
  while (kept > 0 && had.x[kept - 1] >= start) kept -= 1;
  const joined = {};
  const single = had.low === had.mean && fresh.low === fresh.mean; // one value in each bin
  for (const key of single ? ["x", "mean"] : ["x", "mean", "low", "high"]) {
    joined[key] = had[key].slice(0, kept).concat(fresh[key]);
  }
  return single ? { ...joined, low: joined.mean, high: joined.mean } : joined;
}

function runningMean(values, window) {
  const means = [];
  let sum = 0;
  values.forEach((value, i) => {
    sum += value - (i >= window ? values[i - window] : 0);
    means.push(sum / Math.min(i + 1, window));
  });
  return means;
}

/** Return the curves of a panel: one for each metric of each run. */
function panelLines(panel, runs) {
  const lines = [];
  runs.forEach((run, place) => {
    panel.names.forEach((name, index) => {
      const values = run.curves.series.get(name);
      if (run.hidden || values === undefined) return;
      const [low, high] = ["low", "high"].map((end) => run.curves.series.get(`${name}_${end}`));
      const line = { name, place, index, values, dash: [], smooth: null };
      line.label = runs.length > 1 ? (panel.names.length > 1 ? `${run.name}: ${name}` : run.name) : name;
      line.color = runs.length > 1 ? place : index;
      if (runs.length > 1) line.dash = DASHES[index % DASHES.length];
      if (low !== undefined && high !== undefined) {
        line.low = { x: low.x, y: low.mean };
        line.high = { x: high.x, y: high.mean };
      } else if (values.low !== values.mean || values.high !== values.mean) {
        line.low = { x: values.x, y: values.low };
        line.high = { x: values.x, y: values.high };
      }
      if (panel.smoothed && values.mean.length >= 10) {
        line.smooth = runningMean(values.mean, Math.max(3, Math.floor(values.mean.length / 20)));
      }
      lines.push(line);
    });
  });
  return lines;
}

/** Return aligned data for uPlot, with options of its series and bands. */
function chartParts(panel, lines, colors) {
  const [tables, series, bands] = [[], [{}], []];
  const add = (x, y, options) => {
    tables.push([x, y]);
    series.push({ spanGaps: true, ...options });
    return series.length - 1;
  };
  const hidden = { class: "bound", width: 0, points: { show: false } };
  for (const line of lines) {
    const color = colors[line.color % colors.length];
    const points = panel.points || line.values.x.length < 10;
    const style = { label: line.label, stroke: color, width: 1.6, dash: line.dash, points: { show: points, size: 6 } };
    const main = line.smooth ? { ...style, stroke: `${color}66`, width: 1 } : style;
    const index = add(line.values.x, line.values.mean, main);
    series[index].partners = [];
    if (line.low) {
      const high = add(line.high.x, line.high.y, { ...hidden, stroke: color });
      const low = add(line.low.x, line.low.y, { ...hidden, stroke: color });
      bands.push({ series: [high, low], fill: `${color}2e` });
      series[index].partners.push(high, low);
      series[index].bounds = [low, high];
    }
    if (line.smooth) {
      const smooth = { ...style, class: "bound", width: 2.2, points: { show: false } };
      series[index].partners.push(add(line.values.x, line.smooth, smooth));
    }
    series[index].value = (chart, value, place, i) => hoverText(chart, place, i);
  }
  return { data: tables.length ? uPlot.join(tables) : [[], []], series, bands };
}

function hoverText(chart, place, i) {
  const values = chart.data[place] ?? [];
  let at = i;
  if (at === null || at === undefined) for (at = values.length - 1; at > 0 && !Number.isFinite(values[at]); ) at -= 1;
  const bounds = (chart.series[place].bounds ?? []).map((other) => (chart.data[other] ?? [])[at]);
  const text = formatNumber(values[at]);
  return bounds.length && bounds.every(Number.isFinite) ? `${text} (${bounds.map(formatNumber).join(" to ")})` : text;
}

/** Return the newest step, whose values the legend shows without a pointer. */
function lastStep(chart) {
  const step = chart.data?.[0]?.at(-1);
  return step === undefined ? "\u2013" : formatSteps(step);
}

/** Return the index of a series' value nearest to the pointer, as series have values at different steps. */
function nearestIndex(chart, place, i, step) {
  const [xs, values] = [chart.data[0], chart.data[place]];
  const found = (at) => values[at] !== undefined && values[at] !== null;
  if (!values || found(i)) return i;
  let [left, right] = [i, i];
  while (left >= 0 && i - left < SEARCH && !found(left)) left -= 1;
  while (right < xs.length && right - i < SEARCH && !found(right)) right += 1;
  if (!found(left)) return found(right) ? right : null;
  return !found(right) || step - xs[left] <= xs[right] - step ? left : right;
}

function cssColor(name) {
  const probe = element("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

function isDark() {
  const [r, g, b] = cssColor("--ground").match(/\d+(\.\d+)?/g).map(Number);
  return r + g + b < 384;
}

/** Chart of a panel in a card; update() takes the runs, restyle() new colors or another size. */
class Chart {
  constructor(panel, definitions) {
    this.panel = panel;
    this.card = element("figure", "chart");
    const caption = element("figcaption");
    caption.append(element("strong", "", panel.title), element("span", "unit", panel.unit));
    const texts = panel.names.filter((name) => definitions.has(name)).map((name) => `${name}: ${definitions.get(name)}`);
    if (texts.length) caption.title = texts.join("\n");
    this.host = element("div", "plot");
    this.card.append(caption, this.host);
    this.plot = null;
    this.shape = "";
    charts.add(this);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.card);
  }

  update(runs) {
    this.runs = runs;
    const lines = panelLines(this.panel, runs);
    const parts = chartParts(this.panel, lines, isDark() ? DARK : LIGHT);
    const shape = JSON.stringify([parts.series, parts.bands]);
    if (this.plot && shape === this.shape) return this.plot.setData(parts.data);
    const shown = this.plot ? new Map(this.plot.series.map((one) => [one.label, one.show])) : new Map();
    for (const one of parts.series) if (shown.get(one.label) === false && !one.class) one.show = false;
    this.plot?.destroy();
    [this.shape, this.plot] = [shape, null];
    this.card.hidden = lines.length === 0;
    if (lines.length) this.plot = new uPlot(this.options(parts), parts.data, this.host);
  }

  options({ series, bands }) {
    const [text, line] = [cssColor("--faint"), cssColor("--line")];
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: text, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    series[0] = { label: "step", value: (chart, step) => (step === null ? lastStep(chart) : formatSteps(step)) };
    return {
      width: Math.max(200, this.host.clientWidth),
      height: HEIGHT,
      series,
      bands,
      scales: { x: { time: false, range: () => zoom ?? padded(span) }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? formatSteps(tick) : "")), size: 32 },
        { ...axis, values: (_, ticks) => ticks.map(formatNumber), size: 58 },
      ],
      cursor: {
        sync: { key: "steps", scales: ["x", null], setSeries: false },
        drag: { x: true, y: false, setScale: false },
        dataIdx: nearestIndex,
        bind: { dblclick: () => () => (zoomTo(null), null) },
        points: { size: 7 },
      },
      hooks: {
        setSelect: [(chart) => this.select(chart)],
        setSeries: [(chart, i, state) => this.toggle(chart, i, state)],
      },
    };
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.panel.share && low >= 0 && high <= 1) return [-0.02, 1.02];
    const pad = 0.08 * (high - low) || 0.1 * Math.abs(high) || 0.5;
    return [low - pad, high + pad];
  }

  select(chart) {
    const { left, width } = chart.select;
    if (width < 4) return;
    const steps = [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")];
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (steps[1] - steps[0] > 0) zoomTo(steps);
  }

  toggle(chart, i, state) {
    if (state.show === undefined || i === null) return;
    for (const partner of chart.series[i].partners ?? []) chart.setSeries(partner, { show: state.show });
  }

  resize() {
    if (!this.plot && this.runs) this.update(this.runs);
    else if (this.plot && Math.abs(this.plot.width - this.host.clientWidth) > 2 && this.host.clientWidth) {
      this.plot.setSize({ width: this.host.clientWidth, height: HEIGHT });
    }
  }

  restyle() {
    this.shape = "";
    if (this.runs) this.update(this.runs);
  }

  remove() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.card.remove();
    charts.delete(this);
  }
}

function formatSteps(step) {
  return Number.isInteger(step) ? step.toLocaleString("en") : step.toFixed(1);
}

function padded([low, high]) {
  const pad = 0.01 * (high - low) || 0.5;
  return [low - pad, high + pad];
}

/** Show these steps in all charts; null shows all. */
function zoomTo(steps) {
  zoom = steps;
  for (const { plot } of charts) if (plot) plot.setScale("x", { min: null, max: null });
  const reset = document.getElementById("reset-zoom");
  if (reset) {
    reset.hidden = zoom === null;
    if (zoom) reset.textContent = `Steps ${Math.max(0, Math.ceil(zoom[0]))} to ${Math.floor(zoom[1])}: show all`;
  }
  onZoom(zoom);
}

/** Set the steps that all charts share, from the runs' curves. */
function setSpan(runs) {
  const found = runs.filter((run) => !run.hidden).map((run) => run.curves.span()).filter(Boolean);
  if (found.length) span = [Math.min(...found.map(([low]) => low)), Math.max(...found.map(([, high]) => high))];
}

function followScheme() {
  const restyle = () => requestAnimationFrame(() => charts.forEach((chart) => chart.restyle()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  const scheme = document.getElementById("scheme");
  scheme?.addEventListener("change", () => {
    document.documentElement.style.colorScheme = scheme.value;
    restyle();
  });
  document.getElementById("reset-zoom")?.addEventListener("click", () => zoomTo(null));
}
