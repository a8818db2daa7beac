"""An environment that any model with a vocabulary can learn: `tests.support.learning_environment:Fifths`."""

from headpond.environments.protocol import Policy


class Fifths:
    """The reward is the share of sampled tokens whose id is divisible by 5: about 0.2 before the policy has learned.
    Every token counts, so that a few steps suffice, but not the one that ends the message: it cannot be avoided."""

    examples = range(64)

    async def rollout(self, example: int, policy: Policy) -> float:
        completion = await policy.chat([{"role": "user", "content": f"Say something, {example}."}])
        said = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        return float((said % 5 == 0).mean()) if len(said) else 0.0
