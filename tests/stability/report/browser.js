// What plotly knows of a drawn chart. Run in the page by browser.py.

const chart = (id) => document.getElementById(id);

// the pixel of a point, seen from the window: a mark, just below a bar's top, the middle of a cell
const pixel = (id, t, point, row) => {
  const plot = chart(id);
  const trace = plot._fullData[t];
  const [x, y] = [trace.xaxis, trace.yaxis].map(
    (name) => plot._fullLayout[`${name[0]}axis${name.slice(1)}`],
  );
  const mark = plot.calcdata[t][point];
  const [px, py] =
    trace.type === "heatmap"
      ? [x.l2p(x.d2l(trace.x[point])), y.l2p(y.d2l(trace.y[row]))]
      : [x.c2p(mark.x), y.c2p(mark.y) + (trace.type === "bar" ? 2 : 0)];
  const box = plot.getBoundingClientRect();
  return [box.left + x._offset + px, box.top + y._offset + py];
};

// every trace with its numbers as plain lists: plotly may hold them packed
const plain = (values) =>
  values && Array.from(values, (value) => (value?.length && value.map ? plain(value) : value));
const traces = (id) =>
  chart(id)._fullData.map(({ type, hoverinfo, visible, meta, x, y, z, _input }) => ({
    ...{ type, name: _input.name, hoverinfo, visible, meta: meta ?? {} },
    ...{ x: plain(x), y: plain(y), z: plain(z) },
  }));

// what pops up, line by line: name and value are texts of their own, without a space between
const hovered = (id) =>
  [...chart(id).querySelectorAll(".hoverlayer text")]
    .flatMap((text) => {
      const lines = [...text.querySelectorAll("tspan.line")];
      return (lines.length ? lines : [text]).map((line) => line.textContent);
    })
    .join("\n")
    .trim();
