// Line charts as SVG, drawn to the width that they have. Arrow keys move the cursor.

import { h, svg, number, replace } from "./dom.js";

const LEFT = 54, RIGHT = 8, TOP = 6, BOTTOM = 18;

// series: [{ name, steps, values }], of which several runs or keys lie over each other.
export function lineChart({ title, series, format = number, tall = false, note = null }) {
  const shown = series.filter((one) => one.values.some((value) => value !== null));
  const now = h("span", { cls: "now" });
  const figure = h("figure", {}, h("figcaption", {}, h("span", { cls: "name" }, title), note ? h("span", { cls: "muted" }, note) : null, now));
  if (!shown.length) {
    figure.append(h("div", { cls: "empty" }, "no values yet"));
    return figure;
  }
  const canvas = svg("svg", { cls: tall ? "chart tall" : "chart", tabindex: 0, role: "img" });
  figure.append(canvas);
  if (shown.length > 1) figure.append(h("div", {}, shown.map((one, at) => h("span", { cls: "key" }, swatch(at), one.name))));
  const steps = [...new Set(shown.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const tables = shown.map((one) => new Map(one.steps.map((step, at) => [step, one.values[at]])));
  let cursor = null;
  const tell = () => {
    const step = cursor === null ? null : steps[cursor];
    const values = tables.map((table, at) => (step === null ? last(shown[at].values) : table.get(step)));
    const text = values.map((value) => (value === null || value === undefined ? "–" : format(value))).join(" · ");
    now.textContent = step === null ? text : `step ${step}: ${text}`;
    canvas.setAttribute("aria-label", `${title}: ${text} ${step === null ? `at step ${steps[steps.length - 1]}` : `at step ${step}`}`);
  };
  const draw = () => drawn(canvas, shown, tables, steps, cursor, format);
  const move = (to) => { cursor = to === null ? null : Math.max(0, Math.min(steps.length - 1, to)); tell(); draw(); };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT);
    const wanted = steps[0] + share * (steps[steps.length - 1] - steps[0]);
    move(steps.reduce((best, step, at) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? at : best), 0));
  });
  canvas.addEventListener("pointerleave", () => move(null));
  canvas.addEventListener("blur", () => move(null));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (by) { event.preventDefault(); move((cursor ?? steps.length - 1) + by); }
  });
  tell();
  new ResizeObserver(draw).observe(canvas);
  return figure;
}

export function swatch(at) {
  return svg("svg", { viewBox: "0 0 12 4", "aria-hidden": "true" }, svg("rect", { width: 12, height: 4, rx: 2, cls: `f${at % 6}` }));
}

function last(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null) return values[at];
  return null;
}

function drawn(canvas, series, tables, steps, cursor, format) {
  const { width, height } = canvas.getBoundingClientRect();
  if (width < LEFT + RIGHT + 20) return;
  canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const values = series.flatMap((one) => one.values.filter((value) => value !== null));
  let low = Math.min(...values), high = Math.max(...values);
  if (low > 0 && low < (high - low) * 0.6) low = 0;
  if (low === high) { low = Math.min(0, low); high = high > 0 ? 1.5 * high : low < 0 ? 0 : 1; }
  const span = steps[steps.length - 1] - steps[0] || 1;
  const x = (step) => LEFT + ((step - steps[0]) / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
  const parts = ticks(low, high).map((value) => [
    svg("line", { cls: "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, format(value)),
  ]);
  parts.push(svg("text", { x: LEFT, y: height - 4 }, `step ${steps[0]}`));
  if (steps.length > 1) parts.push(svg("text", { x: width - RIGHT, y: height - 4, "text-anchor": "end" }, String(steps[steps.length - 1])));
  series.forEach((one, at) => {
    const points = one.steps.map((step, place) => [step, one.values[place]]).filter(([, value]) => value !== null);
    const path = points.map(([step, value], place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    if (series.length === 1) parts.push(svg("path", { cls: `area f${at % 6}`, d: `${path}L${x(points[points.length - 1][0]).toFixed(1)} ${height - BOTTOM}L${x(points[0][0]).toFixed(1)} ${height - BOTTOM}Z` }));
    parts.push(svg("path", { cls: `line s${at % 6}`, d: path }));
    if (points.length === 1) parts.push(svg("circle", { cls: `f${at % 6}`, cx: x(points[0][0]), cy: y(points[0][1]), r: 3 }));
  });
  if (cursor !== null) {
    const at = x(steps[cursor]);
    parts.push(svg("line", { cls: "cursor", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
    tables.forEach((table, one) => {
      const value = table.get(steps[cursor]);
      if (value !== null && value !== undefined) parts.push(svg("circle", { cls: `f${one % 6}`, cx: at, cy: y(value), r: 3.5 }));
    });
  }
  replace(canvas, parts);
}

function ticks(low, high) {
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) || rough;
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-9 && found.length < 6; value += size) found.push(Number(value.toPrecision(12)));
  return found;
}
