"use strict";
// What the plots of all pages share. Colours come from the style sheet, so a theme change or a print redraws everything.
const plots = (() => {
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = () => ({ stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" });

  const describe = (words) => (chart) => {
    chart.ctx.canvas.setAttribute("role", "img");
    chart.ctx.canvas.setAttribute("aria-label", words);
  };

  // The line under a plot tells the value under the pointer, and its extent again when the pointer leaves.
  const readOut = (host, words) => {
    const line = host.parentElement.querySelector(".extent");
    line.dataset.rest ??= line.textContent;
    return (chart) => {
      const index = chart.cursor.idx;
      line.textContent = index == null ? line.dataset.rest : words(index);
    };
  };

  // Draws one plot anew; `options(host)` gives those of uPlot, and the table.
  const draw = (host, options) => {
    host.replaceChildren();
    const [made, table] = options(host);
    drawn.get(host)?.destroy();
    drawn.set(host, new uPlot({ width: Math.max(host.clientWidth, 200), legend: { show: false }, ...made }, table, host));
  };

  const start = (options) => {
    const visible = () => [...document.querySelectorAll(".chart")].filter((host) => !host.closest("details:not([open])"));
    const redraw = () => visible().forEach((host) => draw(host, options));
    const theme = (name) => () => {
      if (name) document.documentElement.dataset.theme = name;
      else delete document.documentElement.dataset.theme;
      redraw();
    };
    redraw();
    document.querySelectorAll("details.more").forEach((more) => more.addEventListener("toggle", () => more.open && redraw()));
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
  };

  return { data: JSON.parse(document.getElementById("data").textContent), colour, axis, describe, readOut, start };
})();
