// Elements, text and numbers. Text of a run only ever becomes a text node.

export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  return filled(element, props, children);
}

export function svg(tag, props, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width%") element.style.width = `${value}%`;
    else if (name === "left%") element.style.left = `${value}%`;
    else element.setAttribute(name === "cls" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u0080-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

// Characters that a browser does not draw, or that would turn the text around, are shown by their number.
export function visible(text) {
  return String(text).replace(/\r/g, "␍").replace(HIDDEN, (found) => {
    const code = found.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e12) return `${(value / 1e12).toFixed(1)} T`;
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  if (value < 1e6) return `${(value / 3600).toFixed(1)} h`;
  return `${number(value / 3600)} h`;
}

export function bytes(value) {
  if (!value) return "0";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} B`;
}

export function clock(at) {
  return at ? new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ") : "–";
}

export function table(heads, rows) {
  return h("div", { cls: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", cls: head.n ? "n" : null }, head.name ?? head)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, at) => h("td", { cls: heads[at].n ? "n" : heads[at].cls }, cell)))))));
}

export function facts(pairs) {
  return h("dl", { cls: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function panel(title, ...children) {
  return h("section", { cls: "panel" }, title ? h("h2", {}, title) : null, children);
}

export function segmented(label, names, chosen, choose) {
  return h("div", { cls: "seg", role: "group", "aria-label": label },
    names.map(([key, text]) => h("button", { type: "button", "aria-pressed": String(key === chosen), onclick: () => choose(key) }, text)));
}

export function tag(state, text) {
  return h("span", { cls: `tag ${state}` }, text ?? state);
}
