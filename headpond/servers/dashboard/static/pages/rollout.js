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
      h("div", { cls: "grid" }, summary(rollout), timeline(rollout, talk.timeline || []), attempts(rollout), metrics(rollout)),
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

const LANES = [["turn", "turns"], ["tool", "tools"], ["grading", "grading"], ["program", "program"]];

function timeline(rollout, spans) {
  const whole = rollout.duration_s;
  if (!whole) return panel("Timeline", h("p", { cls: "muted" }, "It has no result yet."));
  const parts = spans.filter((span) => span.kind !== "rollout");
  const length = Math.max(whole, ...spans.map((span) => span.begin_s + span.seconds));
  const engine = rollout.result?.metrics?.engine_s;
  const lanes = LANES.map(([kind, text]) => [text, parts.filter((span) => span.kind === kind)]).filter(([, some]) => some.length);
  return panel("Timeline",
    lanes.length ? h("div", { cls: "lanes" }, lanes.map(([text, some]) => lane(text, some, length)), h("span", {}), h("div", { cls: "axis" }, h("span", {}, "0 s"), h("span", {}, seconds(length)))) : null,
    facts([["began", clock(rollout.generated_at - whole)], ["generated", clock(rollout.generated_at)], ["took", seconds(whole)],
      ["engine", engine === undefined ? "not measured, or no longer kept" : seconds(engine)],
      ...lanes.slice(1).map(([text, some]) => [text, `${seconds(total(some))} in ${number(some.length)} ${some.length === 1 ? "call" : "calls"}`]),
      ["waiting and other", parts.length ? seconds(Math.max(0, length - covered(parts))) : null]]),
    parts.length ? details(parts) : h("p", { cls: "muted" }, "Turns and tools have no times: the files are deleted, or an earlier release wrote them."));
}

function lane(text, spans, length) {
  return [h("span", {}, text), h("div", { cls: "lane", role: "img", "aria-label": `${text}: ${spans.length}, ${seconds(total(spans))}` },
    spans.map((span) => h("div", { cls: span.kind, title: `${label(span)}: ${seconds(span.seconds)} from ${seconds(span.begin_s)}`, "left%": (100 * span.begin_s) / length, "width%": (100 * span.seconds) / length })))];
}

function details(parts) {
  const rows = parts.map((span) => [label(span), seconds(span.begin_s), seconds(span.seconds)]);
  return h("details", {}, h("summary", {}, `${number(parts.length)} times`), table([{ name: "what" }, { name: "begin", n: 1 }, { name: "took", n: 1 }], rows));
}

function label(span) {
  return span.kind === "turn" ? `turn ${Number(span.name) + 1}` : visible(`${span.kind} ${span.name}`);
}

function total(spans) {
  return spans.reduce((sum, span) => sum + span.seconds, 0);
}

// Seconds in which at least one of the spans, sorted by their begin, goes on. A program's own turns lie inside it.
function covered(spans) {
  let end = 0, sum = 0;
  for (const span of spans.filter((one) => one.kind !== "program")) {
    const until = span.begin_s + span.seconds;
    sum += Math.max(0, until - Math.max(end, span.begin_s));
    end = Math.max(end, until);
  }
  return sum;
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
  if (!values.length) return null;
  return h("section", { cls: "panel wide" }, h("h2", {}, "Rewards and metrics"), facts(values.map(([name, value]) => [visible(name), number(value)])));
}
