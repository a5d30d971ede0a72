// Draws the metrics of a trial over training steps.
(() => {
  const { data, colour } = plots;
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

  const padded = (low, high) => {
    if (low === null || high === null) return [0, 1];
    const pad = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 1;
    return [low - pad, high + pad];
  };

  plots.start((host) => {
    const plot = data.plots[host.dataset.level][Number(host.dataset.index)];
    const lone = isolated(plot.values);
    const few = plot.steps.length <= 40;
    const axis = plots.axis();
    const words = (index) => `step ${plot.steps[index].toLocaleString("en")}: ${text(plot.values[index])}`;
    const span = [plot.steps[0], plot.steps[plot.steps.length - 1]];
    const whole = (chart, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : ""));
    return [
      {
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
        cursor: { y: false, drag: { x: false, y: false }, sync: { key: host.dataset.level } },
        hooks: { draw: [markGaps(plot.gaps), plots.describe(`${plot.tag} over training steps`)], setCursor: [plots.readOut(host, words)] },
      },
      [plot.steps, plot.values],
    ];
  });
})();
