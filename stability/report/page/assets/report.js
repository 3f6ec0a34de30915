// Draws the figures in #data as they come near the screen, in the colours of the page. What a reader
// chooses (a section's options, arms switched off) changes every chart at once and stands in the
// address, so that it survives a reload and can be sent to somebody.
"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 600px)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const AXIS = /^[xy]axis\d*$/;
  const root = document.documentElement;

  let figures; // id -> { data, layout }
  let chosen; // section -> { name: option }
  const off = new Set(); // arms switched off
  const drawn = new Set(); // ids of the charts drawn so far
  let observer;
  let printing = false; // paper is white whatever the theme, and narrower than the screen
  const PAPER = { width: 660, lower: 0.7 }; // px between the margins of A4; two charts fit a page

  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const plot = (id) => document.getElementById(id);
  const sectionOf = (id) => plot(id).closest("[data-section]")?.dataset.section;

  // A tick has room for the end of a long name only, where names of one kind differ; hovering, and
  // the tables, give the whole.
  const short = (name) => {
    const most = narrow.matches ? 16 : 44;
    const signs = [...name]; // not halves of an emoji
    return signs.length > most ? `\u2026${signs.slice(1 - most).join("")}` : name;
  };
  const shown = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const said = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");

  // Where ticks, and so %{y}, are shortened, a heat map's cells get their row's whole name; those of a
  // thinned one have no room for it beside their own step.
  const named = (map) =>
    map.text || map.y.every((name) => short(said(name)) === said(name))
      ? map
      : {
          ...map,
          text: map.y.map((name) => map.x.map(() => name)),
          hovertemplate: map.hovertemplate.replace("%{y}", "%{text}"),
        };

  // ---- what shows

  const shows = (trace, choice) =>
    !off.has(trace.meta?.arm) &&
    Object.entries(trace.meta ?? {}).every(([name, option]) => !(name in choice) || choice[name] === option);

  const colours = () => {
    const [ink, grid, page] = dark.matches && !printing ? ["#e6e9ed", "#2b3138", "#1c2127"] : ["#1b1f24", "#e5e9ee", "#ffffff"];
    return { ink, grid, page };
  };

  const put = (layout, path, value) => {
    const keys = path.split(".");
    const last = keys.pop();
    let place = layout;
    for (const key of keys) place = place[key] = { ...place[key] };
    place[last] = value;
  };

  const laidOut = (id, choice) => {
    const source = figures[id].layout;
    const layout = { ...source, autosize: true, uirevision: JSON.stringify(choice) };
    const { ink, grid, page } = colours();
    layout.font = { ...source.font, color: ink };
    layout.hoverlabel = { ...source.hoverlabel, bgcolor: page, bordercolor: grid, font: { color: ink } };
    for (const axis of Object.keys(source).filter((key) => AXIS.test(key))) {
      layout[axis] = { ...source[axis], gridcolor: grid, zerolinecolor: "#8c8c8c", linecolor: grid, tickcolor: grid };
    }
    for (const [name, option] of Object.entries(choice)) {
      for (const [path, value] of Object.entries(source.meta?.[name]?.[option] ?? {})) put(layout, path, value);
    }
    for (const kind of ["shapes", "annotations"]) {
      if (source[kind]) layout[kind] = source[kind].filter((part) => !off.has(part.name));
    }
    const rows = source.meta?.rows; // the arm of each tick of the y axis
    if (rows) {
      const on = rows.map((_, place) => place).filter((place) => !off.has(rows[place]));
      const ticktext = on.map((place) => {
        const text = shown(short(rows[place]));
        return source.yaxis.ticktext[place].startsWith("<b>") ? `<b>${text}</b>` : text;
      });
      layout.yaxis = { ...layout.yaxis, tickvals: on, ticktext };
    }
    if (printing) {
      const height = source.height * (source.height > 450 ? 1 : PAPER.lower);
      Object.assign(layout, { width: PAPER.width, height, autosize: false });
      if (source.legend?.y < 0) layout.legend = { ...source.legend, y: (source.legend.y * source.height) / height };
    } else if (narrow.matches) {
      layout.height = source.height + 60;
      if (source.xaxis?.type === "category" && source.legend) { // its ticks stand upright
        layout.height += 80;
        layout.legend = { ...source.legend, y: -0.5 };
      }
    }
    return layout;
  };

  const draw = async (id) => {
    const choice = chosen[sectionOf(id)] ?? {};
    const traces = figures[id].data
      .filter((trace) => shows(trace, choice))
      .map((trace) => (trace.type === "heatmap" ? named(trace) : trace));
    const layout = laidOut(id, choice);
    const names = traces.filter((trace) => trace.type === "heatmap").flatMap((trace) => trace.y);
    if (names.length) layout.yaxis.labelalias = Object.fromEntries(names.map((name) => [name, shown(short(said(name)))]));
    const first = !drawn.has(id);
    drawn.add(id);
    plot(id).style.height = `${layout.height}px`; // plotly forgets the layout's when the window changes
    await Plotly.react(id, traces, layout, config);
    if (first) {
      plot(id).on("plotly_legendclick", ({ curveNumber, data }) => {
        const trace = data[curveNumber];
        if (!trace.meta?.arm || trace.visible === "legendonly") return true;
        if (!isPinned(trace.meta.arm)) toggle(trace.meta.arm);
        return false;
      });
    }
    root.dataset.drawn = drawn.size;
  };

  const redraw = (within = document) =>
    Promise.all(all(".plot", within).map((place) => place.id).filter((id) => drawn.has(id)).map(draw));

  const drawAll = () => Promise.all(Object.keys(figures).filter((id) => !drawn.has(id)).map(draw));

  // ---- what a reader chooses

  const isPinned = (arm) => all("button[data-arm]").some((button) => button.dataset.arm === arm && button.disabled);

  const toggle = (arm) => {
    off.has(arm) ? off.delete(arm) : off.add(arm);
    showSwitches();
    remember();
    return redraw();
  };

  // A section that shows one arm at a time goes on to another when its own is switched off.
  const showSwitches = () => {
    for (const button of all("button[data-arm]")) button.setAttribute("aria-pressed", !off.has(button.dataset.arm));
    for (const row of all("[data-arm-row]")) row.classList.toggle("off", off.has(row.dataset.armRow));
    for (const select of all('select[data-choice="arm"]')) {
      const options = [...select.options];
      for (const option of options) option.disabled = off.has(option.value);
      if (off.has(select.value)) {
        const next = options.find((option) => !option.disabled);
        if (next) choose(select, next.value);
      }
    }
  };

  const choose = (select, option) => {
    select.value = option;
    const section = select.closest("[data-section]").dataset.section;
    (chosen[section] ??= {})[select.dataset.choice] = option;
  };

  const remember = () => {
    const words = new URLSearchParams();
    for (const arm of off) words.append("off", arm);
    for (const select of all("select[data-choice]")) {
      const key = `${select.closest("[data-section]").dataset.section}.${select.dataset.choice}`;
      if (select.selectedIndex > 0) words.append(key, select.value);
    }
    history.replaceState(null, "", `${location.pathname}${location.search}${words.size ? `#${words}` : ""}`);
  };

  const recall = () => {
    const words = new URLSearchParams(location.hash.slice(1));
    const known = new Set(all("button[data-arm]:not(:disabled)").map((button) => button.dataset.arm));
    off.clear();
    for (const arm of words.getAll("off")) if (known.has(arm)) off.add(arm);
    for (const select of all("select[data-choice]")) {
      const key = `${select.closest("[data-section]").dataset.section}.${select.dataset.choice}`;
      const option = [...select.options].find((each) => each.value === words.get(key));
      choose(select, option ? option.value : select.options[0].value);
    }
  };

  // ---- the page

  const start = () => {
    ({ figures } = JSON.parse(document.getElementById("data").textContent));
    chosen = {};
    drawn.clear();
    root.dataset.drawn = 0;
    recall();
    showSwitches();
    for (const button of all("button[data-arm]")) button.addEventListener("click", () => toggle(button.dataset.arm));
    for (const select of all("select[data-choice]")) {
      select.addEventListener("change", () => {
        choose(select, select.value);
        remember();
        redraw(select.closest("[data-section]"));
      });
    }
    observer?.disconnect();
    observer = new IntersectionObserver(
      (entries) => {
        for (const { isIntersecting, target } of entries) {
          if (!isIntersecting) continue;
          observer.unobserve(target);
          if (!drawn.has(target.id)) draw(target.id);
        }
      },
      { rootMargin: "800px" },
    );
    for (const id of Object.keys(figures)) observer.observe(plot(id));
  };

  // Shows a newer state of the same page, from its parsed document; what the reader chose stays.
  const replace = (newer) => {
    const open = all("details").map((details) => details.open);
    for (const id of drawn) Plotly.purge(id);
    for (const part of ["header", "main", "#data"]) {
      document.querySelector(part).replaceWith(document.adoptNode(newer.querySelector(part)));
    }
    all("details").forEach((details, index) => (details.open = open[index] ?? false));
    start();
  };

  window.report = { drawAll, replace };
  for (const query of [dark, narrow]) query.addEventListener("change", () => redraw());
  const repaint = (onPaper) => {
    printing = onPaper;
    redraw();
    if (onPaper) drawAll();
  };
  window.addEventListener("beforeprint", () => repaint(true));
  window.addEventListener("afterprint", () => repaint(false));
  window.addEventListener("hashchange", () => {
    recall();
    showSwitches();
    redraw();
  });
  start();

  // `stability report --watch` writes the page anew while the study runs.
  const seconds = Number(document.body.dataset.reload);
  if (seconds) setInterval(() => document.hidden || location.reload(), 1000 * seconds);
})();
