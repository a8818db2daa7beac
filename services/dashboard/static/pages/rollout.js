// One rollout: what it is, how it came to be, what was said, every token.

import { h, clock, facts, number, panel, seconds, table, tag, visible } from "../dom.js";
import { get } from "../data.js";
import { conversationView } from "./conversation.js";
import { tokenPanel } from "./tokens.js";

export async function rolloutPage(run, id) {
  const [rollout, talk, tokens] = await Promise.all([get(`runs/${run}/rollouts/${id}`), get(`runs/${run}/rollouts/${id}/conversation`), tokenPanel(run, id)]);
  return {
    content: [
      h("div", { cls: "title" }, h("h1", {}, `Rollout ${id}`), tag(rollout.state, rollout.reason ? visible(rollout.reason) : rollout.state),
        h("a", { href: `#/${run}/group/${rollout.group}` }, `its group of ${rollout.group_rollouts}`)),
      h("div", { cls: "grid" }, summary(rollout), timeline(rollout), attempts(rollout), metrics(rollout)),
      h("div", { cls: "panel gap" }, h("h2", {}, "Conversation"),
        talk.kept ? talk.conversations.map((messages, at) => [talk.conversations.length > 1 ? h("h2", {}, `Conversation ${at + 1}`) : null, conversationView(run, id, messages, at)]) : h("p", { cls: "muted" }, visible(talk.why))),
      tokens,
    ],
  };
}

function summary(rollout) {
  const result = rollout.result || {};
  return panel("Summary", facts([
    ["environment", `${visible(rollout.environment)}, example ${rollout.example}`], ["step", rollout.step === null ? null : String(rollout.step)],
    ["reward", number(rollout.reward)], ["advantage", number(rollout.advantage)],
    ["tokens", `${number(rollout.completion_tokens)} sampled, ${number(rollout.prompt_tokens)} prompt, ${number(rollout.tool_tokens)} between turns`],
    ["turns", number(rollout.turns)], ["samples", number(rollout.samples)],
    ["version", rollout.version_first === null ? null : rollout.version_first === rollout.version_last ? String(rollout.version_first) : `${rollout.version_first} to ${rollout.version_last}`],
    ["flags", [rollout.masked && "loss mask 0", rollout.truncated && "truncated", rollout.policy_failed && "the policy failed"].filter(Boolean).join(", ")],
    ["policy error", result.policy_error ? visible(result.policy_error) : null], ["error", rollout.error ? visible(rollout.error) : null],
    ["columns", result.columns ? h("code", {}, result.columns.key) : null],
  ]));
}

function timeline(rollout) {
  const engine = rollout.result?.metrics?.engine_s, whole = rollout.duration_s;
  if (!whole) return panel("Timeline", h("p", { cls: "muted" }, "It has no result yet."));
  const share = engine === undefined ? 0 : Math.min(100, (100 * engine) / whole);
  return panel("Timeline",
    h("div", { cls: "timeline", role: "img", "aria-label": `${seconds(whole)}` }, h("div", { cls: "engine", "width%": share }), h("div", { cls: "rest", "width%": 100 - share })),
    facts([["began", clock(rollout.generated_at - whole)], ["generated", clock(rollout.generated_at)], ["took", seconds(whole)],
      ["engine", engine === undefined ? "not measured, or no longer kept" : seconds(engine)], ["tools, waiting, grading", engine === undefined ? null : seconds(Math.max(0, whole - engine))]]));
}

function attempts(rollout) {
  const jobs = rollout.jobs.map((job) => [visible(job.id), job.state, number(job.attempt), number(job.failures), number(job.losses), visible(job.error || "")]);
  const events = rollout.events.map((event) => [clock(event.at), event.action, visible(event.detail)]);
  return panel("Attempts",
    jobs.length ? table([{ name: "job" }, { name: "state" }, { name: "attempts", n: 1 }, { name: "failed", n: 1 }, { name: "lost", n: 1 }, { name: "error" }], jobs)
      : h("p", { cls: "muted" }, `${number(rollout.failures)} failures, ${number(rollout.losses)} losses. The ledger keeps more of newer rollouts (trainer.keep_events_steps).`),
    events.length ? table([{ name: "at", cls: "nowrap" }, { name: "what" }, { name: "detail" }], events) : null);
}

function metrics(rollout) {
  const result = rollout.result || {};
  const values = [...Object.entries(result.rewards || {}), ...Object.entries(result.metrics || {})];
  return values.length ? panel("Rewards and metrics", facts(values.map(([name, value]) => [visible(name), number(value)]))) : null;
}
