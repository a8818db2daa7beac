// The token strip: every token coloured by one of its values.

import { h, number, panel, replace, segmented, visible } from "../dom.js";
import { get, isReport } from "../data.js";

const COUNT = 1024;
const DIVERGING = new Set(["advantage", "mismatch"]);
const NAMES = { mask: "mask", version: "version", logprob: "logprob", advantage: "advantage", mismatch: "mismatch", routed: "routing" };
let chosen = "mask";

export async function tokenPanel(run, rollout) {
  const section = panel("Tokens");
  const body = h("div", {});
  section.append(body);
  const show = async (start) => {
    try {
      replace(body, strip(await get(`runs/${run}/rollouts/${rollout}/tokens`, { start, count: COUNT }), run, rollout, show));
    } catch (error) {
      replace(body, h("p", { cls: "muted" }, visible(error.message)));
    }
  };
  await show(0);
  return section;
}

function strip(page, run, rollout, show) {
  if (!page.kept) return h("p", { cls: "muted" }, visible(page.why));
  const measures = ["mask", ...Object.keys(page.values), "version"].filter((name) => name === "mask" || name === "version" || page.values[name].some((value) => value !== null));
  const current = measures.includes(chosen) ? chosen : "mask";
  const again = (name) => { chosen = name; const whole = strip(page, run, rollout, show); root.replaceWith(whole); whole.querySelector("[aria-pressed=true]")?.focus(); };
  const picked = h("div", { cls: "picked", "aria-live": "polite" }, h("span", { cls: "muted" }, "Choose a token: click it, or use the arrow keys."));
  const colour = colouring(page, current);
  const starts = new Set(page.samples.slice(1).map(([start]) => start));
  const spans = page.ids.map((id, at) => tokenSpan(page, id, at, colour(at), starts.has(page.start + at)));
  const text = h("div", { cls: "strip", tabindex: 0, role: "group", "aria-label": "Tokens" }, spans);
  let cursor = null;
  const pick = (at) => {
    if (cursor !== null) spans[cursor].removeAttribute("aria-current");
    cursor = Math.max(0, Math.min(spans.length - 1, at));
    spans[cursor].setAttribute("aria-current", "true");
    replace(picked, described(page, cursor));
  };
  text.addEventListener("click", (event) => { const at = spans.indexOf(event.target.closest(".t")); if (at >= 0) pick(at); });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -20, ArrowDown: 20 }[event.key];
    if (by) { event.preventDefault(); pick((cursor ?? -1) + by); }
  });
  const end = page.start + page.ids.length;
  const root = h("div", {},
    h("div", { cls: "filters" }, segmented("Colour by", measures.map((name) => [name, NAMES[name] || name]), current, again), copyButton(page, run, rollout)),
    colour.legend(), text, picked,
    h("div", { cls: "pager" },
      h("button", { type: "button", disabled: page.start === 0, onclick: () => show(Math.max(0, page.start - COUNT)) }, "← Before"),
      h("span", { cls: "muted" }, `${number(page.start)} to ${number(end)} of ${number(page.tokens)} tokens, ${page.samples.length} sample${page.samples.length === 1 ? "" : "s"}`),
      h("button", { type: "button", disabled: end >= page.tokens || isReport(), onclick: () => show(end) }, "After →")));
  return root;
}

function tokenSpan(page, id, at, cls, isBreak) {
  const raw = page.texts ? page.texts[at] : String(id);
  const text = page.texts ? visible(raw).replace(/\n/g, "⏎\n") || "∅" : raw;
  return h("span", { cls: `t ${page.texts ? "" : "id"} ${cls} ${isBreak ? "break" : ""}` }, text);
}

function colouring(page, name) {
  if (name === "mask") {
    const pick = (at) => (page.mask[at] ? "c0" : "v-none");
    pick.legend = () => legend([["c0", "trained"], ["v-none", "context"], ["break", "a sample begins: the prefix broke"]]);
    return pick;
  }
  if (name === "version") {
    const known = [...new Set(page.version.filter((one) => one >= 0))].sort((a, b) => a - b);
    const pick = (at) => (page.version[at] < 0 ? "v-none" : `c${known.indexOf(page.version[at]) % 6}`);
    pick.legend = () => legend(known.map((one, at) => [`c${at % 6}`, `version ${one}`]));
    return pick;
  }
  const values = page.values[name];
  if (name === "routed") {
    const pick = (at) => (values[at] ? "c3" : "w4");
    pick.legend = () => legend([["c3", "the engine sent routed experts"], ["w4", "none"]]);
    return pick;
  }
  const known = values.filter((value) => value !== null).map(Math.abs);
  const most = Math.max(1e-9, ...known);
  const level = (value) => Math.min(4, Math.floor((5 * Math.abs(value)) / most));
  const pick = (at) => (values[at] === null ? "v-none" : `${DIVERGING.has(name) && values[at] < 0 ? "w" : "v"}${level(values[at])}`);
  pick.legend = () => legend(DIVERGING.has(name) ? [["w4", `−${number(most)}`], ["w1", ""], ["v1", ""], ["v4", `+${number(most)}`]] : [["v0", "0"], ["v2", ""], ["v4", number(name === "logprob" ? -most : most)]]);
  return pick;
}

function legend(items) {
  return h("div", { cls: "legend" }, items.map(([cls, text]) => [h("span", { cls: `sw ${cls}` }, text || " ")]));
}

function described(page, at) {
  const place = page.start + at;
  const sample = page.samples.findIndex(([start, end]) => place >= start && place < end);
  const turn = page.turns.findIndex((one) => place >= one.start && place < one.end);
  const values = Object.entries(page.values).filter(([, list]) => list[at] !== null).map(([name, list]) => `${name} ${list[at]}`);
  const parts = [`token ${place}`, `id ${page.ids[at]}`, page.texts ? `“${visible(page.texts[at])}”` : null, page.mask[at] ? "trained" : "context", `sample ${sample}`,
    turn >= 0 ? `turn ${turn}: ${page.turns[turn].finish_reason}` : null, page.version[at] >= 0 ? `version ${page.version[at]}` : null, ...values];
  return parts.filter(Boolean).map((part) => h("span", {}, part));
}

function copyButton(page, run, rollout) {
  const button = h("button", { type: "button" }, "Copy ids");
  button.addEventListener("click", async () => {
    const ids = [];
    while (!isReport() && ids.length < page.tokens) {
      const part = await get(`runs/${run}/rollouts/${rollout}/tokens`, { start: ids.length, count: 4096 });
      if (!part.ids?.length) break;
      ids.push(...part.ids);
    }
    await navigator.clipboard.writeText(JSON.stringify(ids.length ? ids : page.ids));
    button.textContent = `Copied ${number(ids.length || page.ids.length)}`;
  });
  return button;
}
