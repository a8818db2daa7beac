import asyncio
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from support.engine_clients import run
from support.upstream import calling, tool_call
from support.waiting import wait_until_async

from headpond.environments import Completion, Message, Tools, tool
from headpond.errors import ConfigError, InfrastructureFailure, PolicyFailure


def completion(*calls: Message) -> Completion:
    return Completion(message=calling(*calls), finish_reason="tool_calls", truncated=False)


class Place(BaseModel):
    city: str
    country: str = "Kenya"


@tool(timeout_s=100)
async def weather(
    place: Place, days: Annotated[int, Field(ge=1, le=7, description="how many")] = 1, unit: Literal["C", "F"] = "C"
) -> str:
    """What the weather will be.

    For some days.
    """
    return f"{days} warm days in {place.city}, {place.country} ({unit})"


@dataclass
class Account:
    balance: int = 10

    @tool
    async def pay(self, amount: int) -> dict[str, int]:
        """Pays."""
        if amount > self.balance:
            raise ValueError(f"there are only {self.balance}")
        self.balance -= amount
        return {"left": self.balance}


@tool
def thread() -> str:
    return threading.current_thread().name


@tool
async def leave() -> str:
    raise SystemExit(3)


@tool
async def lookup(key: str) -> str:
    return {}[key]


def contents(tools: Tools, *calls: Message) -> list[str]:
    results: list[str] = []

    async def main() -> None:
        messages = await tools.answer(completion(*calls))
        assert [message["tool_call_id"] for message in messages] == [call["id"] for call in calls]
        assert {message["role"] for message in messages} <= {"tool"}
        results.extend(message["content"] for message in messages)

    run(main)
    return results


def test_the_schema_of_a_tool_comes_from_its_annotations() -> None:
    assert Tools(Account().pay).schemas == [
        {
            "type": "function",
            "function": {
                "name": "pay",
                "description": "Pays.",
                "parameters": {
                    "type": "object",
                    "properties": {"amount": {"type": "integer"}},
                    "required": ["amount"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    schema = Tools(weather).schemas[0]["function"]
    assert schema["description"] == "What the weather will be.\n\nFor some days."
    assert schema["parameters"]["required"] == ["place"]
    assert schema["parameters"]["properties"]["days"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 7,
        "description": "how many",
    }


def test_arguments_are_converted_by_their_annotations() -> None:
    place = {"city": "Nairobi"}
    assert contents(
        Tools(weather, thread),
        tool_call("weather", {"place": place}, id="a"),
        tool_call("weather", {"place": place, "days": 3, "unit": "F"}, id="b"),
        tool_call("thread", "", id="c"),
    )[:2] == ["1 warm days in Nairobi, Kenya (C)", "3 warm days in Nairobi, Kenya (F)"]


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (tool_call("whether", {}), "error: there is no tool whether; there are weather, pay, lookup, leave"),
        (tool_call("pay", {"amount": 2.5}), "error: pay: amount: Input should be a valid integer"),
        (tool_call("pay", {"amount": "3"}), "error: pay: amount: Input should be a valid integer"),
        (tool_call("pay", {"amount": 1, "to": "me"}), "error: pay: to: Extra inputs are not permitted"),
        (tool_call("pay", "{"), "error: pay: Invalid JSON: EOF while parsing an object at line 1 column 1"),
        (tool_call("pay", "[1]"), "error: pay: Input should be an object"),
        (
            tool_call("weather", {"place": {}, "days": 9}),
            "error: weather: place: city: Field required; days: Input should be less than or equal to 7",
        ),
        (tool_call("pay", {"amount": 11}), "error: there are only 10"),
        (tool_call("lookup", {"key": "k"}), "error: KeyError: 'k'"),
        (tool_call("leave", {}), "error: SystemExit: 3"),
    ],
)
def test_an_invalid_or_failed_call_returns_an_error_message(call: Message, content: str) -> None:
    tools = Tools(weather, Account().pay, lookup, leave)
    assert contents(tools, call) == [content]
    assert (tools.calls, tools.errors) == (1, 1)


def test_a_broken_tool_is_logged_once_without_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def broken(secret: str) -> str:
        raise RuntimeError(secret)

    results = contents(Tools(broken), *(tool_call("broken", {"secret": "hunter2"}, id=str(n)) for n in range(3)))
    assert results == ["error: RuntimeError: hunter2"] * 3
    assert len([record for record in caplog.records if "action=tool_failed" in record.message]) == 1
    assert "test_tools.py, line" in caplog.text
    assert "hunter2" not in caplog.text


def test_calls_of_a_turn_run_concurrently_up_to_a_limit_and_keep_their_order() -> None:
    running, most, together = 0, 0, 3

    @tool
    async def meet(name: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if int(name) < together:
            await wait_until_async(lambda: most == together)
        running -= 1
        return name

    names = [str(number) for number in range(10)]
    calls = [tool_call("meet", {"name": name}, id=name) for name in names]
    assert contents(Tools(meet, at_once=together), *calls) == names
    assert most == together


def test_each_tool_has_its_own_timeout() -> None:
    @tool(timeout_s=0.01)
    async def slow() -> str:
        await asyncio.sleep(1000)
        return "late"

    @tool
    async def times_out_by_itself() -> str:
        raise TimeoutError("its server")

    place = {"city": "Nairobi"}
    assert contents(
        Tools(slow, weather, times_out_by_itself),
        tool_call("slow", {}, id="a"),
        tool_call("weather", {"place": place}, id="b"),
        tool_call("times_out_by_itself", {}, id="c"),
    ) == [
        "error: slow took longer than 0.01 s",
        "1 warm days in Nairobi, Kenya (C)",
        "error: TimeoutError: its server",
    ]


def test_a_plain_function_runs_in_a_thread_that_is_abandoned_at_the_timeout() -> None:
    released = threading.Event()

    @tool(timeout_s=0.01)
    def hangs() -> str:
        released.wait(60)
        return "late"

    async def main() -> None:
        tools = Tools(hangs, thread)
        calls = [tool_call("hangs", {}, id="a"), tool_call("thread", {}, id="b")]
        results = [message["content"] for message in await tools.answer(completion(*calls))]
        assert results[0] == "error: hangs took longer than 0.01 s"
        assert results[1].startswith("headpond-io")
        released.set()

    run(main)


@pytest.mark.parametrize("failure", [InfrastructureFailure("the sandbox is down"), PolicyFailure("it cheated")])
def test_headpond_errors_propagate_and_cancel_the_other_calls(failure: Exception) -> None:
    ended: list[str] = []

    @tool
    async def waits() -> str:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("waits")
        return ""

    @tool
    async def fails() -> str:
        raise failure

    async def main() -> None:
        with pytest.raises(type(failure)) as raised:
            await Tools(waits, fails).answer(completion(tool_call("waits", {}), tool_call("fails", {}, id="c2")))
        assert raised.value is failure
        assert ended == ["waits"]

    run(main)


def test_cancellation_ends_all_calls() -> None:
    begun, ended = 0, 0

    @tool
    async def waits() -> str:
        nonlocal begun, ended
        begun += 1
        try:
            await asyncio.sleep(1000)
        finally:
            ended += 1
        return ""

    async def main() -> None:
        calls = [tool_call("waits", {}, id=str(number)) for number in range(5)]
        answering = asyncio.create_task(Tools(waits, at_once=2).answer(completion(*calls)))
        await wait_until_async(lambda: begun == 2)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        assert (begun, ended) == (2, 2)

    run(main)


def test_a_method_is_bound_to_its_instance() -> None:
    rich, poor = Account(100), Account(1)
    assert contents(Tools(rich.pay), tool_call("pay", {"amount": 30})) == ['{"left":70}']
    assert contents(Tools(poor.pay), tool_call("pay", {"amount": 30})) == ["error: there are only 1"]
    assert asyncio.run(Account.pay(rich, 1)) == {"left": 69}


def no_annotation(a) -> str:
    return a


def many(*a: int) -> str:
    return str(a)


@pytest.mark.parametrize("function", [no_annotation, many])
def test_a_function_without_a_schema_cannot_be_a_tool(function: Any) -> None:
    with pytest.raises(ConfigError, match=f"{function.__name__}: .*parameter a .*annotated"):
        tool(function)
