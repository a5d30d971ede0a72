"use strict";
// Draws the plots of the report from its JSON block. Colours come from the style sheet, so a theme change or a
// print redraws everything.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (value) => (value === null ? "not finite" : Number(value.toPrecision(6)).toString());

  // A line between two points needs both; a finite point between two gaps would be invisible without a dot.
  const isolated = (values) => {
    const lone = [];
    values.forEach((value, i) => {
      if (value !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null) lone.push(i);
    });
    return lone;
  };

  const markGaps = (gaps) => (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.fillStyle = colour("--fail");
    for (const [first, last] of gaps) {
      const left = chart.valToPos(first, "x", true);
      const width = Math.max(chart.valToPos(last, "x", true) - left, 3 * devicePixelRatio);
      ctx.globalAlpha = 0.22;
      ctx.fillRect(left - 1, bbox.top, width, bbox.height);
      ctx.globalAlpha = 1;
      ctx.fillRect(left - 1, bbox.top, width, 4 * devicePixelRatio);
    }
    ctx.restore();
  };

  const describe = (tag) => (chart) => {
    chart.ctx.canvas.setAttribute("role", "img");
    chart.ctx.canvas.setAttribute("aria-label", `${tag} over training steps`);
  };

  // The line under a plot tells the value under the pointer, and its extent again when the pointer leaves.
  const readOut = (host, plot) => {
    const line = host.parentElement.querySelector(".extent");
    line.dataset.rest ??= line.textContent;
    return (chart) => {
      const index = chart.cursor.idx;
      line.textContent = index == null ? line.dataset.rest : `step ${plot.steps[index].toLocaleString("en")}: ${text(plot.values[index])}`;
    };
  };

  const padded = (low, high) => {
    if (low === null || high === null) return [0, 1];
    const pad = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 1;
    return [low - pad, high + pad];
  };

  const draw = (host) => {
    const plot = data.plots[host.dataset.level][Number(host.dataset.index)];
    const lone = isolated(plot.values);
    const few = plot.steps.length <= 40;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const span = [plot.steps[0], plot.steps[plot.steps.length - 1]];
    const whole = (chart, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : ""));
    host.replaceChildren();
    const chart = new uPlot(
      {
        width: Math.max(host.clientWidth, 200),
        height: 140,
        scales: { x: { time: false, range: span[0] === span[1] ? [span[0] - 1, span[0] + 1] : span }, y: { range: (u, low, high) => padded(low, high) } },
        axes: [
          { ...axis, size: 24, gap: 4, values: whole, space: 44 },
          { ...axis, size: 54, gap: 4, space: 26, values: (u, splits) => splits.map((value) => Number(value.toPrecision(4)).toString().replace("e+", "e")) },
        ],
        series: [
          {},
          {
            stroke: colour("--series"), width: 1.6,
            points: few ? { show: true, size: 4, fill: colour("--series") } : { show: lone.length > 0, size: 4, fill: colour("--series"), filter: () => lone },
          },
        ],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, sync: { key: host.dataset.level } },
        hooks: { draw: [markGaps(plot.gaps), describe(plot.tag)], setCursor: [readOut(host, plot)] },
      },
      [plot.steps, plot.values],
      host,
    );
    drawn.get(host)?.destroy();
    drawn.set(host, chart);
  };

  const visible = () => [...document.querySelectorAll(".chart")].filter((host) => !host.closest("details:not([open])"));
  const redraw = () => visible().forEach(draw);
  const theme = (name) => () => {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    redraw();
  };

  redraw();
  document.querySelectorAll("details.more").forEach((more) => more.addEventListener("toggle", () => more.open && more.querySelectorAll(".chart").forEach(draw)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", theme("light"));
  addEventListener("afterprint", theme(""));
  let width = innerWidth;
  let timer = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(redraw, 120);
  });
})();
