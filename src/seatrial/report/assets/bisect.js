// Draws every run of a bisect over the commits.
(() => {
  const { data, colour } = plots;
  const measured = data.metric !== null;
  const LEVELS = { good: 0, skip: 1, bad: 2 };
  const MARKS = ["good", "bad", "skip"];
  const TONES = { good: "--pass", bad: "--fail", skip: "--skipped" };

  // One entry for every run, and one for every commit that has none, so that the pointer finds each commit.
  const byPoint = new Map();
  for (const run of data.runs) byPoint.set(run[0], [...(byPoint.get(run[0]) ?? []), run]);
  const entries = data.points.flatMap((_, index) => byPoint.get(index) ?? [[index, 0, "", null, ""]]);
  const values = data.runs.map((run) => run[3]).filter((value) => value !== null);
  const shown = data.limit === null ? values : [...values, data.limit];
  const spread = measured ? Math.max(...shown) - Math.min(...shown) || Math.abs(shown[0]) * 0.1 || 1 : 2;
  const low = measured ? Math.min(...shown) - spread * 0.1 : -0.5;
  const high = measured ? Math.max(...shown) + spread * 0.1 : 2.5;
  // With a metric, a run without a value stands on the floor.
  const height = ([, , mark, value]) => (mark === "" ? null : measured ? value ?? low : LEVELS[mark]);
  const table = [entries.map((entry) => entry[0]), ...MARKS.map((mark) => entries.map((entry) => (entry[2] === mark ? height(entry) : null)))];

  const shade = (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = colour("--fail");
    for (const [first, last] of data.suspects) {
      const left = chart.valToPos(first - 0.5, "x", true);
      const width = Math.max(chart.valToPos(last + 0.5, "x", true) - left, 3 * devicePixelRatio);
      ctx.globalAlpha = 0.16;
      ctx.fillRect(left, bbox.top, width, bbox.height);
      ctx.globalAlpha = 1;
      ctx.fillRect(left, bbox.top, width, 4 * devicePixelRatio);
    }
    if (data.limit !== null) {
      const y = chart.valToPos(data.limit, "y", true);
      ctx.strokeStyle = colour("--soft");
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  };

  const words = (index) => {
    const [commit, subject, repo] = data.points[index];
    const runs = byPoint.get(index) ?? [];
    const said = runs.map(([, , mark, value, reason]) => (value === null ? `${mark}${reason ? `: ${reason}` : ""}` : `${mark} ${Number(value.toPrecision(6))}`));
    return `${repo ? `${repo} ` : ""}${commit.slice(0, 12)} ${subject} (${index} of ${data.points.length - 1}): ${said.join(", ") || "not run"}`;
  };

  const about = `${measured ? data.metric : "marks"} over commits; the table of steps says the same`;
  const commits = (chart, splits) => splits.map((index) => (Number.isInteger(index) && data.points[index] ? data.points[index][0].slice(0, 7) : ""));
  // The first bad commit has a label of its own; the regular ones give way to it.
  const single = data.suspects.length === 1 && data.suspects[0][0] === data.suspects[0][1] ? data.suspects[0][0] : null;
  const ticks = (chart, axis, from, to, step) => {
    const regular = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) regular.push(at);
    if (single === null || single < from || single > to) return regular;
    return [...regular.filter((at) => Math.abs(at - single) >= step), single].sort((one, other) => one - other);
  };
  const levels = (chart, splits) => splits.map((level) => Object.keys(LEVELS).find((name) => LEVELS[name] === level) ?? "");
  const numbers = (chart, splits) => splits.map((value) => Number(value.toPrecision(4)).toString().replace("e+", "e"));

  plots.start((host) => {
    const first = Number(host.dataset.first) - 0.8;
    const last = Number(host.dataset.last) + 0.8;
    const series = MARKS.map((mark) => ({
      label: mark, paths: () => null,
      points: { show: true, size: 9, width: mark === "skip" ? 2 : 1, stroke: colour(TONES[mark]), fill: mark === "skip" ? colour("--card") : colour(TONES[mark]) },
    }));
    const y = measured ? { values: numbers, size: 60, space: 34 } : { values: levels, splits: () => [0, 1, 2], size: 60 };
    return [
      {
        height: measured ? 300 : 260,
        scales: {
          x: { time: false, range: (u, from, to) => (from === table[0][0] && to === table[0][table[0].length - 1] ? [first, last] : [from, to]) },
          y: { range: [measured ? low - spread * 0.04 : low, high] },
        },
        axes: [{ ...plots.axis(), size: 26, gap: 6, values: commits, splits: ticks, space: 70, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }, { ...plots.axis(), gap: 6, ...y }],
        series: [{}, ...series],
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        hooks: { drawAxes: [shade], draw: [plots.describe(about)], setCursor: [plots.readOut(host, (at) => words(entries[at][0]))] },
      },
      table,
    ];
  });
})();
