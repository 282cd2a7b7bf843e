// Stacked bars of a page: <div data-plot='{"x": [seconds], "series": [{"label": "", "values": []}], "unit": "$"}'>.
// The first series is at the bottom.
const HUES = 6;

function draw(element) {
  const { x, series, unit } = JSON.parse(element.dataset.plot);
  const sums = x.map(() => 0);
  for (const it of series) it.top = it.values.map((number, day) => (sums[day] += number));
  series.reverse(); // a bar covers those that were drawn before it
  const look = getComputedStyle(document.documentElement);
  const colour = (name) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(--${name})`;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  const short = new Intl.NumberFormat("en", unit ? { maximumSignificantDigits: 3 } : { notation: "compact" });
  const value = (_, __, place, day) => (day === null || day === undefined ? "–" : unit + short.format(series[place - 1].values[day]));
  const options = {
    width: element.clientWidth, height: 240,
    axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => unit + short.format(tick)) }],
    series: [{ value: "{YYYY}-{MM}-{DD}" }, ...series.map(({ label }, index) => {
      const hue = colour(`voice-${1 + (series.length - 1 - index) % HUES}`);
      return { label, value, stroke: hue, fill: hue, paths: uPlot.paths.bars({ size: [0.7, 60] }), points: { show: false } };
    })],
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    scales: { y: { range: (_, __, max) => [0, max || 1] } },
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
