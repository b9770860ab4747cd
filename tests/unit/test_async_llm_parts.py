"""What AsyncLLM is made of, each part alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from octavo.graphs.errors import (
    BackendError,
    CapacityError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.runtime import CompletionOutput, Logprob, RequestOutput, SamplingParams
from octavo.runtime.invariants import InvariantError
from octavo.runtime.metrics.request_metrics import RequestMetrics
from octavo.runtime.metrics.snapshots import empty_snapshot
from octavo.runtime.prompts import EncodedPrompt
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from octavo.runtime.serving import wire
from octavo.runtime.serving.engine_loop import EngineLoop
from octavo.runtime.serving.engine_process import HIGH_WATER_MARK, SocketChannel
from octavo.runtime.serving.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Event,
    Failed,
    PinPrefix,
    Progress,
    ReadMetrics,
    ReleasePin,
    Reply,
    ResetPrefixCache,
    Shutdown,
    Started,
    StartFailed,
)
from octavo.runtime.serving.options import SupervisionOptions
from octavo.runtime.serving.outbox import Outbox
from octavo.runtime.serving.output_stream import OutputStream

TIMES = RequestMetrics(1.5, 0.25, None, None, None, None, None, None, 3, 1)
GREEDY = SamplingParams(temperature=0)


def output(
    key: int = 0,
    *completions: CompletionOutput,
    finished: bool = False,
    error: OctavoError | None = None,
    prompt_logprobs: Any = None,
) -> RequestOutput:
    return RequestOutput(
        request_id=str(key),
        prompt=None,
        prompt_token_ids=[],
        outputs=list(completions),
        finished=finished,
        num_cached_tokens=3,
        metrics=TIMES,
        prompt_logprobs=prompt_logprobs,
        error=error,
    )


def completion(index: int, text: str, *token_ids: int, **values: Any) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=list(token_ids), **values)


def add(key: int, params: Any = GREEDY) -> AddRequest:
    return AddRequest(key, [1, 2], "", params, 0)


class TestWire:
    @pytest.mark.parametrize(
        "command",
        [
            add(1),
            AddRequest(2**40, [], "sält\ud800", SamplingParams(seed=2**64 - 1, n=3), 10**30),
            add(2, SamplingParams(stop=["\ud800", "b"], top_k=10**5000, logit_bias={5: 1, 6: 2})),
            add(3, BeamSearchParams(beam_width=3, max_tokens=2, early_stopping="never")),
            AbortRequest(1),
            PinPrefix(1, [1, 2], ""),
            ReleasePin(1),
            ResetPrefixCache(1),
            ReadMetrics(1),
            Shutdown(),
        ],
    )
    def test_commands_arrive_as_they_were_sent(self, command: Command) -> None:
        assert wire.decode_command(wire.encode_command(command)) == command

    def test_outputs_arrive_as_they_were_sent(self) -> None:
        logprobs = [{5: Logprob(-0.5, 1, "é"), 3: Logprob(float("-inf"), 7)}, {9: Logprob(0.0, 1)}]
        sent = [
            output(
                1,
                completion(0, "\ufffdé", 1, 2, logprobs=logprobs, cumulative_logprob=-1.5),
                completion(3, "", finish_reason="stop", stop_reason="\ud800", score=0.1),
                prompt_logprobs=[None, *logprobs],
            ),
            output(2, finished=True),
        ]
        arrived = wire.decode_event(
            wire.encode_event(Progress([(1, sent[0]), (2, sent[1])], empty_snapshot()))
        )
        assert arrived == Progress([(1, sent[0]), (2, sent[1])], empty_snapshot())
        (_, first), _ = arrived.outcomes
        assert isinstance(first, RequestOutput)
        assert first.outputs[0].logprobs is not None
        assert list(first.outputs[0].logprobs[0]) == [5, 3]  # in this order

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (RequestError("é \ud800"), RequestError, "é \ud800"),
            (QueueFullError("x"), QueueFullError, "x"),
            (InvariantError("x"), InvariantError, "x"),
            (MemoryError("x"), MemoryError, "x"),
            (UnicodeDecodeError("a", b"", 0, 1, "r"), OctavoError, "UnicodeDecodeError: 'a' codec"),
            (type("Strange", (Exception,), {})("x"), OctavoError, "Strange: x"),
            (type("errors", (Exception,), {})("x"), OctavoError, "errors: x"),
        ],
    )
    def test_errors_keep_class_and_message(
        self, error: Exception, kind: type[Exception], message: str
    ) -> None:
        for event in (StartFailed(error), Failed(error)):
            arrived = wire.decode_event(wire.encode_event(event))
            assert type(arrived) is type(event)
            _assert_same(arrived.error, kind, message)
        reply = wire.decode_event(wire.encode_event(Reply(3, error=error)))
        assert isinstance(reply, Reply)
        _assert_same(reply.error, kind, message)
        progress = wire.decode_event(wire.encode_event(Progress([(4, error)])))
        assert isinstance(progress, Progress)
        ((key, failure),) = progress.outcomes
        assert key == 4
        _assert_same(failure, kind, message)

    def test_an_output_carries_its_error(self) -> None:
        sent = Progress([(1, output(1, finished=True, error=BackendError("it failed")))])
        arrived = wire.decode_event(wire.encode_event(sent))
        assert isinstance(arrived, Progress)
        ((_, result),) = arrived.outcomes
        assert isinstance(result, RequestOutput)
        _assert_same(result.error, BackendError, "it failed")

    def test_other_events(self) -> None:
        for event in (Started("/ü\udcff"), Reply(3), Reply(4, empty_snapshot()), Progress()):
            arrived = wire.decode_event(wire.encode_event(event))
            assert arrived == (Progress([]) if event == Progress() else event)

    def test_a_value_that_cannot_be_sent(self) -> None:
        with pytest.raises(TypeError, match="of type object can not be sent"):
            wire.pack([object()])


def _assert_same(error: object, kind: type[Exception], message: str) -> None:
    assert type(error) is kind
    assert str(error).startswith(message)


class FakeEngine:
    """Answers `step` with what it is told: outputs, or an error to raise."""

    def __init__(self, *steps: Sequence[RequestOutput] | Exception) -> None:
        self.steps = list(steps)
        self.calls: list[str] = []
        self.refuse: Exception | None = None

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)

    def add_request(self, request_id: str, *_: Any, **__: Any) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.calls.append(f"add {request_id}")

    def abort_request(self, request_id: str) -> bool:
        self.calls.append(f"abort {request_id}")
        return True

    def step(self) -> Sequence[RequestOutput]:
        self.calls.append("step")
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def metrics(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}


class FakeChannel:
    """Gives out commands, one list a call, then Shutdown."""

    def __init__(self, *commands: list[Command]) -> None:
        self.commands = list(commands)
        self.timeouts: list[float | None] = []
        self.events: list[Event] = []

    def receive(self, timeout: float | None) -> list[Command]:
        self.timeouts.append(timeout)
        return self.commands.pop(0) if self.commands else [Shutdown()]

    def send(self, event: Event) -> None:
        self.events.append(event)

    @property
    def outcomes(self) -> list[Any]:
        return [
            one for event in self.events if isinstance(event, Progress) for one in event.outcomes
        ]


class TestEngineLoop:
    def run(self, engine: FakeEngine, channel: FakeChannel) -> None:
        EngineLoop(engine, channel).run()  # type: ignore[arg-type]

    def test_commands_are_obeyed_between_steps(self) -> None:
        outputs = [output(1), output(1, finished=True), output(2, finished=True)]
        engine = FakeEngine([outputs[0]], [outputs[1]], [outputs[2]])
        channel = FakeChannel([add(1)], [add(2), AbortRequest(9), ResetPrefixCache(5)], [])
        self.run(engine, channel)
        assert engine.calls == ["add 1", "step", "add 2", "reset", "step", "step"]
        assert channel.outcomes == [(1, outputs[0]), (1, outputs[1]), (2, outputs[2])]
        assert Reply(5) in channel.events

    def test_it_never_waits_while_there_is_work_and_sleeps_without(self) -> None:
        engine = FakeEngine([], [output(1, finished=True)])
        channel = FakeChannel([add(1)], [], [], [])
        self.run(engine, channel)
        busy, idle, asleep = channel.timeouts[:2], channel.timeouts[2], channel.timeouts[3:]
        assert busy == [0.0, 0.0]
        assert idle is not None
        assert idle > 0  # then the last metrics are sent
        assert asleep == [None, None]
        assert channel.events[-1] == Progress([], {"calls": 3})

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (QueueFullError("full"), QueueFullError, "full"),
            (MemoryError(), CapacityError, "does not fit into memory"),
            (KeyError("x"), RequestError, r"cannot be prepared \(KeyError: 'x'\)"),
        ],
    )
    def test_a_request_that_is_refused_ends_alone(
        self, error: Exception, kind: type[Exception], message: str
    ) -> None:
        engine = FakeEngine()
        engine.refuse = error
        channel = FakeChannel([add(1)])
        self.run(engine, channel)
        ((key, failure),) = channel.outcomes
        assert key == 1
        with pytest.raises(kind, match=message):
            raise failure

    def test_a_failed_step_ends_all_that_was_open_and_the_loop_goes_on(self) -> None:
        error = BackendError("no more")
        engine = FakeEngine(error, error, [output(3, finished=True)], error, error)
        channel = FakeChannel([add(1), add(2)], [], [add(3)], [add(4)], [add(5)])
        self.run(engine, channel)
        assert channel.outcomes == [
            (1, error),
            (2, error),
            (3, output(3, finished=True)),
            (4, error),
            (5, error),
        ]
        assert engine.calls[2:5] == ["step", "abort 1", "abort 2"]

    def test_steps_that_fail_in_a_row_end_the_engine(self) -> None:
        engine = FakeEngine(*[BackendError(f"no {number}") for number in range(3)])
        channel = FakeChannel([add(1)], [add(2)], [add(3)])
        with pytest.raises(BackendError, match="no 2"):
            self.run(engine, channel)
        assert [key for key, _ in channel.outcomes] == [1, 2]

    @pytest.mark.parametrize("error", [InvariantError("x"), MemoryError("x"), AssertionError("x")])
    def test_an_engine_that_cannot_be_trusted_ends(self, error: Exception) -> None:
        channel = FakeChannel([add(1)])
        with pytest.raises(type(error)):
            self.run(FakeEngine(error), channel)
        assert channel.outcomes == []

    def test_an_abort_that_comes_after_the_end(self) -> None:
        """A pin's steps have ended the request; its output comes with the next step."""
        engine = FakeEngine([output(1, finished=True)])
        channel = FakeChannel([add(1), AbortRequest(1)], [])
        self.run(engine, channel)
        assert channel.outcomes == [(1, output(1, finished=True))]


def stream_of(params: Any, loop: asyncio.AbstractEventLoop) -> OutputStream:
    return OutputStream(7, "mine", EncodedPrompt("p", [1]), params, loop)


class TestOutputStream:
    def test_deltas_that_nobody_has_read_are_one(self) -> None:
        async def test() -> None:
            loop = asyncio.get_running_loop()
            params = SamplingParams(n=2, output_kind=RequestOutputKind.DELTA, logprobs=0)
            stream = stream_of(params, loop)
            one, two = {1: Logprob(-1.0, 1)}, {2: Logprob(-2.0, 2)}
            assert not stream.push(
                output(7, completion(1, "a", 1, logprobs=[one]), prompt_logprobs=[None])
            )
            assert not stream.push(
                output(7, completion(1, "b", 2, logprobs=[two], cumulative_logprob=-3.0))
            )
            merged = await stream.next()
            assert (merged.request_id, merged.prompt, merged.prompt_token_ids) == ("mine", "p", [1])
            assert merged.outputs == [
                completion(1, "ab", 1, 2, logprobs=[one, two], cumulative_logprob=-3.0)
            ]
            assert merged.prompt_logprobs == [None]
            last = completion(0, "c", 3, finish_reason="length", logprobs=[one])
            stream.push(output(7, last, finished=True))
            final = await stream.next()
            assert (final.outputs, final.prompt_logprobs, final.finished) == ([last], None, True)

        asyncio.run(test())

    def test_a_waiting_reader_is_woken_once(self) -> None:
        async def test() -> None:
            stream = stream_of(GREEDY, asyncio.get_running_loop())
            reader = asyncio.create_task(stream.next())
            await asyncio.sleep(0)
            assert stream.push(output(7, completion(0, "a", 1)))
            assert not stream.push(output(7, completion(0, "b", 2)))
            stream.wake()
            assert (await reader).outputs == [completion(0, "ab", 1, 2)]
            reader = asyncio.create_task(stream.next())
            await asyncio.sleep(0)
            assert stream.push(output(7, completion(0, "c", 3)))
            stream.wake()
            assert (await reader).text == "abc"

        asyncio.run(test())

    def test_an_error_comes_after_what_was_there_before_it(self) -> None:
        async def test() -> None:
            for at_once in (True, False):
                stream = stream_of(GREEDY, asyncio.get_running_loop())
                stream.push(output(7, completion(0, "a", 1)))
                error = BackendError("no")
                if at_once:
                    stream.fail(error)
                else:
                    stream.push(output(7, finished=True, error=error))
                assert not (await stream.next()).finished
                with pytest.raises(BackendError, match="no"):
                    await stream.next()

        asyncio.run(test())

    def test_an_abort_ends_what_had_not_ended(self) -> None:
        async def test() -> None:
            stream = stream_of(SamplingParams(n=3), asyncio.get_running_loop())
            stream.push(
                output(7, completion(0, "a", 1), completion(1, "b", 2, finish_reason="stop"))
            )
            stream.abort()
            final = await stream.next()
            reasons = [(one.text, one.finish_reason) for one in final.outputs]
            assert reasons == [("a", "abort"), ("b", "stop"), ("", "abort")]
            assert final.finished

        asyncio.run(test())


class TestOutbox:
    def test_an_abort_takes_back_what_was_not_sent(self) -> None:
        outbox = Outbox()
        for number in range(1000):
            outbox.put(add(number))
            outbox.put(AbortRequest(number))
        assert not outbox
        outbox.put(add(1))
        assert outbox.take() == add(1)
        outbox.put(AbortRequest(1))
        outbox.put_first([ReleasePin(5), add(4)])
        assert outbox.keys() == [4]
        outbox.engine_died()
        assert [outbox.take(), outbox.take()] == [add(4), None]

    def test_what_has_waited_too_long_is_taken_out(self) -> None:
        outbox = Outbox()
        for command in (add(1), ReleasePin(2), ReadMetrics(3)):
            outbox.put(command)
        assert outbox.take_older_than(60) == []
        assert outbox.take_older_than(-1) == [1, 3]
        assert not outbox


def test_a_full_socket_waits_and_drops_nothing() -> None:
    """Far more messages than both sides hold, and a reader that only begins when no more go."""
    count = 40 * HIGH_WATER_MARK
    text = "x" * 10_000
    with zmq.Context() as context, context.socket(zmq.DEALER) as here:
        here.set_hwm(HIGH_WATER_MARK)
        here.bind("inproc://engine")
        with context.socket(zmq.DEALER) as there:
            there.set_hwm(HIGH_WATER_MARK)
            there.connect("inproc://engine")
            channel = SocketChannel(there)
            sent = 0

            def send_all() -> None:
                nonlocal sent
                for number in range(count):
                    channel.send(Started(f"{number} {text}"))
                    sent = number + 1

            sender = threading.Thread(target=send_all)
            sender.start()
            sender.join(0.3)
            assert sender.is_alive()
            assert sent <= 2 * HIGH_WATER_MARK + 1
            received = [wire.decode_event(here.recv()) for _ in range(count)]
            sender.join()
    assert received == [Started(f"{number} {text}") for number in range(count)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_restarts": -1}, "max_restarts is -1, it must be at least 0"),
        ({"max_restarts": 1.5}, "max_restarts is 1.5, it must be an integer"),
        ({"restart_window": -1}, r"restart_window is -1\.0, it must be at least 0"),
        ({"heartbeat_timeout": float("nan")}, "heartbeat_timeout is nan"),
        ({"shutdown_timeout": "x"}, "shutdown_timeout is 'x', it must be a number"),
    ],
)
def test_supervision_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SupervisionOptions(**options)
