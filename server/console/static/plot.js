// Plots of a page: <div data-plot='{"x": [seconds], "series": [{"label": "", "values": []}], "unit": "$"}'>.
const HUES = 6;

function draw(element) {
  const { x, series, unit } = JSON.parse(element.dataset.plot);
  const look = getComputedStyle(document.documentElement);
  const colour = (name) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(--${name})`;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  const value = (_, number) => (number === null || number === undefined ? "–" : `${unit}${number.toPrecision(3)}`);
  const options = {
    width: element.clientWidth, height: 240,
    axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => `${unit}${tick}`) }],
    series: [{ value: "{YYYY}-{MM}-{DD}" }, ...series.map(({ label }, index) => {
      const hue = colour(`voice-${1 + index % HUES}`);
      return { label, value, stroke: hue, fill: hue, paths: uPlot.paths.bars({ size: [0.7, 60] }), points: { show: false } };
    })],
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    scales: { y: { range: (_, __, max) => [0, max || 1] } },
  };
  element.replaceChildren();
  const plot = new uPlot(options, [x, ...series.map((it) => it.values)], element);
  new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: 240 })).observe(element);
}

function drawAll() {
  for (const element of document.querySelectorAll("[data-plot]:empty")) draw(element);
}
addEventListener("load", drawAll);
document.addEventListener("htmx:afterSettle", drawAll);
