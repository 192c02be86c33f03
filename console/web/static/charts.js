// Draws each table of a `figure[data-chart]` with uPlot. The table stays: it is the data, and what a page without
// scripts shows. A click in the legend hides a series; a drag narrows the page to what was dragged over.
const FONT = "12px system-ui, sans-serif";
const CANVAS = document.createElement("canvas").getContext("2d");
CANVAS.font = FONT;

// A colour as the style sheet has it now: canvases do not know custom properties, nor light-dark().
function colour(element, name) {
  const probe = document.createElement("span");
  probe.className = name;
  element.append(probe);
  const value = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return value;
}

const UNITS = [[86400e6, " d"], [3600e6, " h"], [60e6, " min"], [1e6, " s"], [1e3, " ms"], [1, " µs"]];
function text(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "percent") return value.toLocaleString("en", { maximumFractionDigits: 2 }) + " %";
  if (unit !== "duration") return value.toLocaleString("en", { maximumFractionDigits: 1 });
  if (value === 0) return "0";
  const [size, name] = UNITS.find(([each]) => Math.abs(value) >= each) ?? UNITS.at(-1);
  return (value / size).toLocaleString("en", { maximumFractionDigits: 1 }) + name;
}
function short(value, unit) {
  if (unit !== "count" || Math.abs(value) < 10000) return text(value, unit);
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}

// What stands along the chart (seconds, or the places of names), and each column's values; an empty cell is null.
// Grouped bars stand beside each other: each name has a place for each of its bars, and one that stays empty.
function grouped({ places, values, labels, names, colours }) {
  const step = names.length + 1;
  const beside = values.map((column, series) => column.flatMap((value) => names.map((_, at) => (at === series ? value : null)).concat(null)).slice(0, -1));
  return { places: [...Array(places.length * step - 1).keys()], values: beside, labels, names, colours, step };
}

function read(table, byName) {
  const rows = [...table.tBodies[0].rows];
  const columns = [...table.tHead.rows[0].cells].slice(1);
  const places = rows.map((row, place) => (byName ? place : Number(row.dataset.at) / 1e6));
  const values = columns.map((_, place) => rows.map((row) => {
    const said = row.cells[place + 1].dataset.value;
    return said === "" ? null : Number(said);
  }));
  const labels = rows.map((row) => row.cells[0].textContent + (byName ? "" : " UTC"));
  return { places, values, labels, names: columns.map((cell) => cell.textContent), colours: columns.map((cell) => cell.dataset.colour) };
}

// Bars stand on each other: each series is drawn up to the sum of those below it that are shown.
function stacked(values, shown) {
  const sums = values[0]?.map(() => 0) ?? [];
  return values.map((column, place) => column.map((value, at) => {
    if (value === null) return null;
    if (shown[place]) sums[at] += value;
    return sums[at];
  }));
}

function hatch(plot, times, values, width, ink) {
  const { left, top, height } = plot.bbox;
  const context = plot.ctx;
  context.save();
  context.beginPath();
  times.forEach((at, place) => {
    if (values.some((column) => column[place] !== null)) return;
    const from = Math.max(left, plot.valToPos(at, "x", true));
    const to = Math.min(left + plot.bbox.width, plot.valToPos(at + width, "x", true));
    if (to > from) context.rect(from, top, to - from, height);
  });
  context.clip();
  context.strokeStyle = ink;
  context.globalAlpha = 0.55;
  context.lineWidth = devicePixelRatio;
  context.beginPath();
  for (let x = left - height; x < left + plot.bbox.width; x += 7 * devicePixelRatio) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.stroke();
  context.restore();
}

function moment(seconds, width) {
  return new Date(seconds * 1000).toISOString().slice(0, width >= 60 ? 16 : 19);
}

// A drag: the page is of the buckets that were dragged over.
function narrow(chart, width) {
  if (chart.select.width < 8) return;
  const since = chart.posToVal(chart.select.left, "x"), until = chart.posToVal(chart.select.left + chart.select.width, "x");
  const address = new URL(location.href);
  for (const name of ["cursor", "after", "period", "recount", "last", "live"]) address.searchParams.delete(name);
  address.searchParams.set("since", moment(Math.floor(since / width) * width, width));
  address.searchParams.set("until", moment(Math.ceil(until / width) * width, width));
  location.href = address;
}

// How far ticks of time stand apart, in seconds; never closer than buckets are.
const STEPS = [
  ...[1, 5, 10, 15, 30], ...[1, 2, 5, 10, 15, 30].map((minutes) => minutes * 60), ...[1, 2, 3, 6, 12].map((hours) => hours * 3600),
  ...[1, 2, 7, 14, 30, 91, 182, 365].map((days) => days * 86400),
];

const HIDDEN = new Set();  // series that a click has hidden: a page that refreshes itself keeps them hidden
const DRAWN = new Map();  // by figure: what draws it anew

// By time: from left to right. By name: one place for each; where names are long, bars lie across, the first on top.
function draw(figure) {
  const table = figure.querySelector("table");
  const place = figure.querySelector(".plot");
  const tip = figure.querySelector(".tip");
  const legend = figure.querySelector(".legend");
  const byName = figure.dataset.chart === "names", across = figure.dataset.across === "yes";
  const isGrouped = figure.dataset.grouped === "yes";
  const { places, values, labels, names, colours, step = 1 } = isGrouped ? grouped(read(table, byName)) : read(table, byName);
  const { unit, shape, nothing } = figure.dataset;
  const width = byName ? 1 : Number(figure.dataset.width) / 1e6;
  const bars = shape === "bars";
  const key = (series) => `${figure.querySelector("figcaption").firstChild.data} ${names[series]}`;
  const shown = names.map((_, series) => !HIDDEN.has(key(series)));
  const height = across ? 54 + (isGrouped ? 20 : 30) * places.length : 220;
  let plot = null;

  const ends = byName ? [-0.5, places.length - 0.5] : [places[0], places.at(-1) + width];
  const data = () => {
    const drawn = bars && !isGrouped ? stacked(values, shown) : values;
    // The highest stack first: what stands below is painted over it. By time, a last point gives the axis its end.
    const columns = bars ? drawn.toReversed() : drawn;
    return byName ? [places, ...columns] : [[...places, ends[1]], ...columns.map((column) => [...column, null])];
  };
  const order = bars ? names.map((_, at) => names.length - 1 - at) : names.map((_, at) => at);

  function tooltip(chart) {
    const { left, top } = chart.cursor;
    const value = left < 0 ? NaN : chart.posToVal(across ? top : left, "x");
    const at = byName ? Math.floor((value + 0.5) / step) : places.findLastIndex((start) => start <= value);
    tip.hidden = !(at >= 0 && at < labels.length);
    if (tip.hidden) return;
    const title = document.createElement("b");
    title.textContent = labels[at];
    const lines = names.flatMap((name, series) => {
      if (!shown[series]) return [];
      const line = document.createElement("span");
      const mark = document.createElement("i");
      mark.className = "s" + colours[series];
      const value = values[series][isGrouped ? at * step + series : at];
      line.append(mark, `${name}: ${value === null ? nothing : text(value, unit)}`);
      return [line];
    });
    tip.replaceChildren(title, ...lines);
    const x = chart.over.offsetLeft + left;
    const before = x + tip.offsetWidth + 18 > place.clientWidth;
    tip.style.left = Math.max(0, before ? x - tip.offsetWidth - 12 : x + 12) + "px";
    tip.style.top = (across ? Math.max(0, Math.min(top, place.clientHeight - tip.offsetHeight)) : 6) + "px";
  }

  function make() {
    plot?.destroy();
    const soft = colour(figure, "soft-ink");
    const line = colour(figure, "rule");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: FONT };
    const room = (wanted) => (_, words) => 18 + Math.max(...(words ?? ["0"]).map((each) => CANVAS.measureText(each ?? "").width), wanted);
    const along = byName ? {
      ...axis, grid: { show: false }, side: across ? 3 : 2, splits: () => labels.map((_, at) => at * step + (isGrouped ? (names.length - 1) / 2 : 0)), values: (chart) => shortened(chart, labels, across),
      ...(across ? { size: (chart, words) => Math.min(room(0)(chart, words), share(chart)) } : {}),
    } : { ...axis, space: width < 60 ? 84 : 62, incrs: STEPS.filter((step) => step >= width), values: ticks(width) };
    const upwards = {
      ...axis, side: across ? 2 : 3, values: (_, splits) => splits.map((each) => short(each, unit)), incrs: unit === "count" ? whole() : undefined,
      ...(across ? { space: 70 } : { size: room(0) }),
    };
    plot = new uPlot({
      width: place.clientWidth, height, padding: [10, across ? 18 : width < 60 ? 32 : 24, 0, 0],
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1e3), "UTC"), legend: { show: false },
      cursor: { x: !across, y: false, points: { show: false }, drag: { x: !byName, y: false, setScale: false } },
      scales: {
        x: { time: !byName, range: () => ends, ...(across ? { ori: 1, dir: -1 } : {}) },
        y: { range: (_, __, most) => [0, (most || 1) * 1.08], ...(across ? { ori: 0, dir: 1 } : {}) },
      },
      axes: [along, upwards],
      series: [{}, ...order.map((series) => ({
        label: names[series], show: shown[series], stroke: colour(figure, "s" + colours[series]), width: bars ? 0 : 2,
        fill: bars ? colour(figure, "s" + colours[series]) : undefined,
        points: bars ? { show: false } : { show: true, size: 5, fill: colour(figure, "s" + colours[series]), filter: lonely },
        paths: bars ? uPlot.paths.bars({ size: [byName ? 0.7 : 0.82, 90], align: byName ? 0 : 1 }) : uPlot.paths.linear(),
      }))],
      hooks: {
        drawAxes: byName ? [] : [(chart) => hatch(chart, places, values, width, line)],
        setCursor: [tooltip],
        setSelect: byName ? [] : [(chart) => narrow(chart, width)],
      },
    }, data(), place);
    plot.over.addEventListener("mouseleave", () => { tip.hidden = true; });
  }

  legend.replaceChildren(...names.map((name, series) => {
    const button = document.createElement("button");
    const mark = document.createElement("i");
    mark.className = "s" + colours[series];
    button.type = "button";
    button.append(mark, name);
    button.setAttribute("aria-pressed", String(shown[series]));
    button.addEventListener("click", () => {
      shown[series] = !shown[series];
      HIDDEN[shown[series] ? "delete" : "add"](key(series));
      button.setAttribute("aria-pressed", String(shown[series]));
      plot.setSeries(order.indexOf(series) + 1, { show: shown[series] });
      plot.setData(data());
    });
    return button;
  }));
  figure.classList.add("has-plot");
  make();
  DRAWN.set(figure, make);
  new ResizeObserver(() => { if (plot.width !== place.clientWidth) plot.setSize({ width: place.clientWidth, height }); }).observe(place);
}

// A point of a line that has no neighbour would not be seen: it gets a dot.
function lonely(chart, series) {
  const values = chart.data[series];
  return values.flatMap((value, at) => (value != null && values[at - 1] == null && values[at + 1] == null ? [at] : []));
}

// How much of a chart its names may take where bars lie across.
const share = (chart) => Math.max(120, chart.width / 3);

function fitting(label, most) {
  if (CANVAS.measureText(label).width <= most) return label;
  let end = label.length - 1;
  while (end > 1 && CANVAS.measureText(label.slice(0, end) + "…").width > most) end -= 1;
  return label.slice(0, end) + "…";
}

// Names as far as there is room: every one where bars lie across, else as many as fit beside each other.
function shortened(chart, labels, across) {
  if (across) return labels.map((label) => fitting(label, share(chart) - 18));
  const widest = Math.max(...labels.map((label) => CANVAS.measureText(label).width)) + 10;
  const every = Math.ceil((widest * labels.length) / Math.max(1, chart.width - 60));
  return labels.map((label, at) => (at % every === 0 ? label : ""));
}

const whole = () => [1, 2, 5].flatMap((each) => [...Array(13).keys()].map((power) => each * 10 ** power)).sort((a, b) => a - b);
const ticks = (width) => (_, splits) => {
  let day = "";
  const seconds = width < 60 && splits.some((each) => each % 60 !== 0);
  return splits.map((each) => {
    const at = new Date(each * 1000).toISOString();
    const date = new Date(each * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
    if (width >= 86400) return date;
    const clock = at.slice(11, seconds ? 19 : 16);
    const first = date !== day;
    day = date;
    return first ? clock + "\n" + date : clock;
  });
};

function again() {
  for (const make of DRAWN.values()) make();
}

function drawNew() {
  for (const figure of [...DRAWN.keys()]) if (!figure.isConnected) DRAWN.delete(figure);
  for (const figure of document.querySelectorAll("figure[data-chart]")) if (!DRAWN.has(figure)) draw(figure);
}

new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
document.addEventListener("refreshed", drawNew);  // page.js: a part of the page was replaced
drawNew();
