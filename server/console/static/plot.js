// Stacked bars of a page: <div data-plot='{"x": [seconds], "series": [{"label": "", "values": [], "hue": degrees}], "unit": "$"}'>.
// The first series is next to zero. Of those below it, as after a correction, there is a stack as well.
const DAY = 86400;

function draw(element) {
  const { x, series, unit } = JSON.parse(element.dataset.plot);
  const ups = x.map(() => 0), downs = x.map(() => 0);
  for (const it of series) it.top = it.values.map((number, day) => ((number < 0 ? downs : ups)[day] += number));
  series.reverse(); // a bar covers those that were drawn before it
  const look = getComputedStyle(document.documentElement);
  const colour = (text) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = text;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const paper = colour("var(--paper)");
  const axis = { stroke: colour("var(--soft)"), grid: { stroke: colour("var(--line)"), width: 1 }, ticks: { show: false } };
  const short = new Intl.NumberFormat("en", unit ? { style: "currency", currency: "USD", maximumSignificantDigits: 3 } : { notation: "compact" });
  const value = (_, __, place, day) => (day === null || day === undefined ? "–" : short.format(series[place - 1].values[day]));
  const days = ({ bbox }) => x.filter((_, day) => (x.length - 1 - day) % Math.ceil((90 * devicePixelRatio * x.length) / bbox.width) === 0);
  const zeroLine = ({ ctx, bbox, valToPos }) => Object.assign(ctx, { fillStyle: axis.stroke }).fillRect(bbox.left, Math.round(valToPos(0, "y", true)), bbox.width, devicePixelRatio);
  const options = {
    width: element.clientWidth, height: 240,
    axes: [{ ...axis, gap: 10, splits: days, values: "{YYYY}-{MM}-{DD}" }, { ...axis, size: 70, values: (_, ticks) => ticks.map(short.format) }],
    series: [{ label: "Day", value: "{YYYY}-{MM}-{DD}" }, ...series.map(({ label, hue }) => {
      const fill = colour(hue === null ? "var(--voice-1)" : `light-dark(oklch(.55 .12 ${hue}), oklch(.75 .11 ${hue}))`);
      return { label, value, stroke: paper, width: x.length > 62 ? 0 : 1, fill, paths: uPlot.paths.bars({ size: [0.7, 60] }), points: { show: false } };
    })],
    cursor: { drag: { x: false } },
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    scales: {
      x: { auto: false, min: x[0] - DAY / 2, max: x.at(-1) + DAY / 2 },
      y: { range: (_, min, max) => [Math.min(min, 0) * 1.1, Math.max(max, 0) * 1.1 || (min < 0 ? 0 : 1)] },
    },
    hooks: { draw: [zeroLine] },
  };
  element.replaceChildren();
  const plot = new uPlot(options, [x, ...series.map((it) => it.top)], element);
  new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: 240 })).observe(element);
}

function drawAll() {
  for (const element of document.querySelectorAll("[data-plot]:empty")) draw(element);
}
addEventListener("load", drawAll);
document.addEventListener("htmx:afterSettle", drawAll);
