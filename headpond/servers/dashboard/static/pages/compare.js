// Runs over each other: curves, and the settings that differ.

import { h, number, panel, seconds, table, visible } from "../dom.js";
import { get } from "../data.js";
import { lineChart, swatch } from "../charts.js";

const KEYS = [["Reward", "reward_mean", number], ["Reward before filters", "played_reward_mean", number], ["Completion length", "completion_tokens/mean", number], ["Tokens per second", "tokens_per_s", number], ["Staleness", "staleness_mean", number], ["Entropy", "entropy", number], ["KL, sampler to trainer", "trainer/kl", number], ["Step time", "time/step_s", seconds]];

export async function comparePage(run, query, refresh, runs) {
  const curves = await Promise.all(runs.map((_, at) => get(`runs/${at}/curves`)));
  const settings = await Promise.all(runs.map((_, at) => get(`runs/${at}/settings`)));
  const charts = KEYS.map(([title, key, format]) => h("section", { cls: "panel" },
    lineChart({ title, format, tall: true, series: runs.map((one, at) => ({ name: one.name, steps: curves[at].steps, values: curves[at].series[key] || [] })) })));
  const names = [...new Set(settings.flatMap((one) => Object.keys(one.settings)))].sort();
  const text = (value) => (value === undefined ? "–" : visible(JSON.stringify(value)));
  const different = names.filter((name) => new Set(settings.map((one) => text(one.settings[name]))).size > 1);
  const rows = (runs.length > 1 ? different : names).map((name) => [h("code", {}, name), ...settings.map((one) => h("code", {}, text(one.settings[name])))]);
  return {
    content: [
      h("div", { cls: "title" }, h("h1", {}, "Compare"), runs.map((one, at) => h("span", { cls: "key" }, swatch(at), visible(one.name)))),
      h("div", { cls: "grid" }, charts),
      h("div", { cls: "panel gap" }, h("h2", {}, runs.length > 1 ? "Settings that differ" : "Settings"), rows.length ? table([{ name: "setting" }, ...runs.map((one) => ({ name: visible(one.name) }))], rows) : h("p", { cls: "muted" }, "None differs.")),
    ],
  };
}
