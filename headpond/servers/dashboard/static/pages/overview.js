// Curves, steps, lag, queues, workers, engines.

import { h, bytes, clock, facts, number, panel, seconds, table, visible } from "../dom.js";
import { get } from "../data.js";
import { lineChart } from "../charts.js";

const CHARTS = [
  ["Reward", ["reward_mean", "played_reward_mean"], number, ["delivered", "played, before filters"]],
  ["Completion length", ["completion_tokens/mean"], number],
  ["Throughput", ["tokens_per_s"], number, null, "tokens/s"],
  ["Staleness", ["staleness_mean", "staleness_max"], number, ["mean", "max"]],
  ["Entropy", ["entropy", "trainer/entropy"], number, ["of sampled tokens", "by the trainer"], "nats"],
  ["KL, sampler to trainer", ["trainer/kl"], number, null, "reader.annotate"],
  ["Filtered", ["filtered_rate"], (value) => `${(100 * value).toFixed(0)}%`],
  ["Step time", ["time/step_s"], seconds],
];

export async function overviewPage(run) {
  const [view, curves] = await Promise.all([get(`runs/${run}/overview`), get(`runs/${run}/curves`)]);
  return { view, content: [tiles(view), charts(curves), h("div", { cls: "grid" }, steps(view, run), engines(view), lags(view), queues(view), deaths(view), evaluations(view), notes(view))] };
}

function tiles(view) {
  const { rollouts, status } = view;
  const filtered = rollouts ? Object.values(rollouts.filtered).reduce((a, b) => a + b, 0) : null;
  const tile = (label, value, note, cls) => h("div", { cls: `tile ${cls || ""}` }, h("div", { cls: "label" }, label), h("div", { cls: "value" }, value), h("div", { cls: "note", title: note }, note || " "));
  const last = view.last_steps[0] || {};
  return h("div", { cls: "tiles" },
    tile("Steps", `${number(view.step ?? status.step)}${status.steps ? ` / ${number(status.steps)}` : ""}`, `policy version ${number(status.policy_version)}`),
    tile("Reward", number(last.reward_mean), last.step !== undefined ? `step ${last.step}` : "no step yet"),
    tile("Delivered", number(rollouts?.delivered), `of ${number(rollouts?.planned)} planned`),
    tile("In flight", number(rollouts?.in_flight), `${number(status.rollouts_per_s)} rollouts/s`),
    tile("Filtered", number(filtered), rollouts?.planned ? `${(100 * filtered / rollouts.planned).toFixed(1)}%` : ""),
    tile("Dead", number(rollouts?.dead), rollouts?.balanced === false ? "counts do not add up" : "", rollouts?.dead ? "bad" : ""),
    tile("Speed", number(status.tokens_per_s), "tokens/s"),
    tile("Store", bytes(status.stored_bytes), "blobs that are kept"));
}

function charts(curves) {
  return h("div", { cls: "grid" }, CHARTS.map(([title, keys, format, names, note]) => h("section", { cls: "panel" },
    lineChart({ title, format, note, series: keys.map((key, at) => ({ name: names ? names[at] : key, steps: curves.steps, values: curves.series[key] || [] })) }))));
}

function steps(view, run) {
  const heads = ["step", "delivered", { name: "reward", n: 1 }, { name: "rollouts", n: 1 }, { name: "tokens", n: 1 }, { name: "stale", n: 1 }, { name: "filtered", n: 1 }, { name: "step time", n: 1 }, { name: "boundary", n: 1 }].map((head) => (head.name ? head : { name: head, cls: "nowrap" }));
  const rows = view.last_steps.map((line) => [
    h("a", { href: `#/${run}/rollouts?step=${line.step}` }, String(line.step)), clock(line.time), number(line.reward_mean), number(line.rollouts), number(line.tokens),
    number(line.staleness_mean), line.filtered_rate === undefined ? "–" : `${(100 * line.filtered_rate).toFixed(0)}%`, seconds(line["time/step_s"]), seconds(line["time/composed_to_sealed_s"]),
  ]);
  const trainer = view.trainer;
  const acked = trainer.error || `acknowledged ${trainer.acked < 0 ? "none" : `up to step ${trainer.acked}`}, checkpointed ${trainer.checkpointed < 0 ? "none" : `up to step ${trainer.checkpointed}`}, ${trainer.data_ranks || "no"} data rank${trainer.data_ranks === 1 ? "" : "s"}`;
  const section = panel("Steps", rows.length ? table(heads, rows) : h("p", { cls: "muted" }, "No step is delivered yet."), h("p", { cls: "muted" }, `Trainer: ${acked}`));
  section.classList.add("wide");
  return section;
}

function lags(view) {
  const rows = Object.entries(view.lags).map(([process, lag]) => [visible(process), seconds(lag.p99_s), seconds(lag.max_s), seconds(lag.blocked_s)]);
  return panel("Event loop lag", rows.length ? table([{ name: "process" }, { name: "p99", n: 1 }, { name: "max", n: 1 }, { name: "blocked", n: 1 }], rows) : h("p", { cls: "muted" }, "No process reports."));
}

function queues(view) {
  const { status } = view;
  const names = Object.keys(status.queued || {});
  const rows = names.map((name) => [name, number(status.queued[name]), number(status.waiting_jobs?.[name]), number(status.submitted_jobs?.[name])]);
  const workers = Object.entries(status.running_by_worker || {});
  return panel("Queues and workers",
    rows.length ? table([{ name: "queue" }, { name: "messages", n: 1 }, { name: "to submit", n: 1 }, { name: "submitted", n: 1 }], rows) : h("p", { cls: "muted" }, "No status yet."),
    workers.length ? table([{ name: "worker" }, { name: "leases", n: 1 }], workers.map(([name, count]) => [visible(name), number(count)])) : h("p", { cls: "muted" }, "No running jobs."),
    Object.entries(status.excluded_workers || {}).map(([name, why]) => h("p", {}, h("b", {}, `${visible(name)}: `), visible(why))));
}

function engines(view) {
  const replicas = Object.entries(view.status.replicas || {});
  if (!replicas.length) return null;
  const share = (value) => (value === undefined || value === null ? "–" : `${(100 * value).toFixed(0)}%`);
  const rows = replicas.map(([url, one]) => [visible(url), one.serves ? "yes" : "no", visible(one.weights ?? "–"), number(one.running), number(one.waiting), share(one.cache_use)]);
  const section = panel("Engine", table([{ name: "replica" }, { name: "serves" }, { name: "weights" }, { name: "running", n: 1 }, { name: "waiting", n: 1 }, { name: "KV use", n: 1 }], rows));
  section.classList.add("wide"); // waiting and KV use are what one looks for: not behind a scroll bar
  return section;
}

function deaths(view) {
  if (!view.deaths.length) return null;
  return panel("Deaths", table([{ name: "jobs", n: 1 }, { name: "kind" }, { name: "error" }], view.deaths.map((one) => [number(one.jobs), one.kind, visible(one.error || "–")])));
}

function evaluations(view) {
  const names = Object.entries(view.status.evaluations?.names || {});
  if (!names.length) return null;
  return panel("Evaluations", facts(names.map(([name, one]) => [name, one.last ? `reward ${number(one.last.reward_mean)} at version ${one.last.version}` : "none yet"])));
}

function notes(view) {
  const lines = [...(view.status.notes || []), ...(view.ledger_error ? [view.ledger_error] : [])];
  return lines.length ? panel("Notes", lines.map((line) => h("p", {}, visible(line)))) : null;
}
