// Draws the figures in #data, in the colours of the page, and shows what each section's choices say.
"use strict";
(() => {
  const { figures, choices } = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 600px)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  const colours = (layout) => {
    const ink = dark.matches ? "#e6e9ed" : "#1b1f24";
    const grid = dark.matches ? "#2b3138" : "#e5e9ee";
    const patch = { "font.color": ink, "hoverlabel.bgcolor": dark.matches ? "#1c2127" : "#ffffff", "hoverlabel.font.color": ink };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      Object.assign(patch, { [`${axis}.gridcolor`]: grid, [`${axis}.zerolinecolor`]: "#8c8c8c", [`${axis}.linecolor`]: grid, [`${axis}.tickcolor`]: grid });
    }
    return patch;
  };

  const chosenIn = (key) => {
    const section = document.querySelector(`[data-section="${key}"]`);
    const selects = section ? [...section.querySelectorAll("select[data-choice]")] : [];
    return Object.fromEntries(selects.map((select) => [select.dataset.choice, select.value]));
  };

  const patchFor = (layout, chosen) =>
    Object.assign({}, ...Object.entries(chosen).map(([name, option]) => layout.meta?.[name]?.[option] ?? {}));

  const shows = (trace, chosen) =>
    Object.entries(trace.meta ?? {}).every(([name, option]) => chosen[name] === option) && (trace.visible ?? true);

  const drawn = (id) => document.getElementById(id);
  const sectionOf = (id) => drawn(id).closest("[data-section]")?.dataset.section;

  const refresh = (id) => {
    const { data, layout } = figures[id];
    const chosen = chosenIn(sectionOf(id));
    const visible = data.map((trace) => shows(trace, chosen));
    Plotly.update(id, { visible }, { ...colours(layout), ...patchFor(layout, chosen), ...ranges(layout) });
  };

  const ranges = (layout) =>
    Object.fromEntries(
      Object.keys(layout)
        .filter((key) => /^[xy]axis\d*$/.test(key) && !layout[key].range && !layout[key].autorange)
        .map((key) => [`${key}.autorange`, true]),
    );

  for (const [id, { data, layout }] of Object.entries(figures)) {
    const start = choices[sectionOf(id)] ?? {};
    const traces = data.map((trace) => ({ ...trace, visible: shows(trace, start) }));
    const height = narrow.matches ? { height: layout.height + 60 } : {};
    Plotly.newPlot(id, traces, { ...layout, ...height }, config).then(() => refresh(id));
  }
  for (const select of document.querySelectorAll("select[data-choice]")) {
    const section = select.closest("[data-section]");
    select.addEventListener("change", () => section.querySelectorAll(".plot").forEach((plot) => refresh(plot.id)));
  }
  dark.addEventListener("change", () => Object.keys(figures).forEach(refresh));
})();
