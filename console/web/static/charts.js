// Draws each table of a `figure[data-chart]` with uPlot. The table stays: it is the data, and what a page without
// scripts shows. A click in the legend hides a series; a drag narrows the page to what was dragged over.
const CANVAS = document.createElement("canvas").getContext("2d");

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

// Times of the table, in seconds, and each column's values; an empty cell is null.
function read(table) {
  const rows = [...table.tBodies[0].rows];
  const columns = [...table.tHead.rows[0].cells].slice(1);
  const times = rows.map((row) => Number(row.dataset.at) / 1e6);
  const values = columns.map((_, place) => rows.map((row) => {
    const said = row.cells[place + 1].dataset.value;
    return said === "" ? null : Number(said);
  }));
  return { times, values, names: columns.map((cell) => cell.textContent), colours: columns.map((cell) => cell.dataset.colour) };
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

function draw(figure) {
  const table = figure.querySelector("table");
  const place = figure.querySelector(".plot");
  const tip = figure.querySelector(".tip");
  const legend = figure.querySelector(".legend");
  const { times, values, names, colours } = read(table);
  const { unit, shape, nothing } = figure.dataset;
  const width = Number(figure.dataset.width) / 1e6;
  const bars = shape === "bars";
  const shown = names.map(() => true);
  let plot = null;

  const ends = [...times, times.at(-1) + width];
  const data = () => {
    const drawn = bars ? stacked(values, shown) : values;
    // The highest stack first: what stands below is painted over it. A last point gives the axis its end.
    return [ends, ...(bars ? drawn.toReversed() : drawn).map((column) => [...column, null])];
  };
  const order = bars ? names.map((_, at) => names.length - 1 - at) : names.map((_, at) => at);

  function tooltip(chart) {
    const at = chart.cursor.left < 0 ? -1 : times.findLastIndex((start) => start <= chart.posToVal(chart.cursor.left, "x"));
    tip.hidden = at < 0;
    if (at < 0) return;
    const title = document.createElement("b");
    title.textContent = table.tBodies[0].rows[at].cells[0].textContent + " UTC";
    const lines = names.flatMap((name, series) => {
      if (!shown[series]) return [];
      const line = document.createElement("span");
      const mark = document.createElement("i");
      mark.className = "s" + colours[series];
      line.append(mark, `${name}: ${values[series][at] === null ? nothing : text(values[series][at], unit)}`);
      return [line];
    });
    tip.replaceChildren(title, ...lines);
    const x = chart.over.offsetLeft + chart.cursor.left;
    const before = x + tip.offsetWidth + 18 > place.clientWidth;
    tip.style.left = Math.max(0, before ? x - tip.offsetWidth - 12 : x + 12) + "px";
  }

  function make() {
    plot?.destroy();
    const soft = getComputedStyle(figure.querySelector("figcaption .quiet")).color;
    const line = colour(figure, "rule");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    plot = new uPlot({
      width: place.clientWidth, height: 220, padding: [10, 8, 0, 0], tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1e3), "UTC"),
      legend: { show: false }, cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: true, range: () => [ends[0], ends.at(-1)] }, y: { range: (_, __, most) => [0, (most || 1) * 1.08] } },
      axes: [
        { ...axis, space: 62, values: ticks(width) },
        { ...axis, size: (chart, labels) => 16 + Math.max(...(labels ?? ["0"]).map((each) => CANVAS.measureText(each).width * 1.25)),
          values: (_, splits) => splits.map((each) => short(each, unit)), incrs: unit === "count" ? whole() : undefined },
      ],
      series: [{}, ...order.map((series) => ({
        label: names[series], show: shown[series], stroke: colour(figure, "s" + colours[series]), width: bars ? 0 : 2,
        fill: bars ? colour(figure, "s" + colours[series]) : undefined, points: { show: bars ? false : undefined, size: 5 },
        paths: bars ? uPlot.paths.bars({ size: [0.82, 60], align: 1 }) : uPlot.paths.linear(),
      }))],
      hooks: {
        drawAxes: [(chart) => hatch(chart, times, values, width, line)],
        setCursor: [tooltip],
        setSelect: [(chart) => {
          if (chart.select.width < 8) return;
          const since = chart.posToVal(chart.select.left, "x"), until = chart.posToVal(chart.select.left + chart.select.width, "x");
          const address = new URL(location.href);
          for (const name of ["cursor", "after", "period", "recount"]) address.searchParams.delete(name);
          address.searchParams.set("since", moment(Math.floor(since / width) * width, width));
          address.searchParams.set("until", moment(Math.ceil(until / width) * width, width));
          if (figure.dataset.zoom === "yes") location.href = address;
        }],
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
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      shown[series] = !shown[series];
      button.setAttribute("aria-pressed", String(shown[series]));
      plot.setSeries(order.indexOf(series) + 1, { show: shown[series] });
      plot.setData(data());
    });
    return button;
  }));
  figure.classList.add("has-plot");
  make();
  new ResizeObserver(() => { if (plot.width !== place.clientWidth) plot.setSize({ width: place.clientWidth, height: 220 }); }).observe(place);
  new MutationObserver(make).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", make);
}

const whole = () => [1, 2, 5].flatMap((each) => [...Array(13).keys()].map((power) => each * 10 ** power)).sort((a, b) => a - b);
const ticks = (width) => (_, splits) => {
  let day = "";
  return splits.map((each) => {
    const at = new Date(each * 1000).toISOString();
    const date = new Date(each * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
    if (width >= 86400) return date;
    const clock = at.slice(11, width >= 60 ? 16 : 19);
    const first = date !== day;
    day = date;
    return first ? clock + "\n" + date : clock;
  });
};

for (const figure of document.querySelectorAll("figure[data-chart]")) draw(figure);
