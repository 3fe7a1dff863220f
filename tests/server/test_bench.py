"""The arithmetic of `octavo bench`, in virtual time: what a stream's bytes and moments become in a report."""

import asyncio
import itertools
import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.bench.client import Address, Record, Stream
from octavo.server.bench.figures import Objective, inter_token, samples, summary, tokens_of_chunks
from octavo.server.bench.load import Outcome
from octavo.server.bench.report import markdown, text
from octavo.server.bench.workload import Shape, Span, read_trace
from octavo.server.values import OptionError


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data


def chunk(text: str = "", finish: str | None = None, **more: object) -> bytes:
    choices = [{"index": 0, "text": text, "finish_reason": finish, **more.pop("choice", {})}]
    return b"data: " + json.dumps({"choices": choices, **more}, ensure_ascii=False).encode() + b"\n\n"


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def received(*parts: tuple[float, bytes], lost: bool = True, sent: float = 0.0) -> Record:
    """The record of a stream whose bytes arrive at these moments."""

    async def play() -> Record:
        record, now = Record(sent=sent), [sent]
        stream = Stream(b"request", record, lambda: now[0])
        transport = Transport()
        stream.connection_made(transport)
        assert transport.sent == b"request"
        for now[0], data in parts:
            stream.data_received(data)
        if lost:
            stream.connection_lost(None)
        assert stream.done.done()
        return record

    return asyncio.run(play())


def test_tokens_arrive_when_the_bytes_that_complete_their_line_do() -> None:
    record = received(
        (1.0, HEAD),
        (1.5, chunk("a")[:-1]),
        (2.0, chunk("b") + chunk("c")[:10]),
        (2.25, chunk("c", "length")[10:]),
        (2.5, usage(7, 3, 4) + DONE),
        (9.0, b"more"),
        sent=0.5,
    )
    assert record.arrivals == [1.5, 2.0, 2.25]
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, 4)
    assert (record.error, record.finish_reason, record.sent, record.ended) == (None, "length", 0.5, 2.5)


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=12), st.data())
def test_how_bytes_are_cut_into_packets_changes_nothing(texts: list[str], data: st.DataObject) -> None:
    stream = HEAD + b": keep-alive\n\n" + b"".join(map(chunk, texts)) + chunk("", "stop") + usage(1, 5) + DONE
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    record = received(*((float(moment), piece) for moment, piece in enumerate(pieces)))
    assert record.characters == [len(text) for text in texts]
    assert record.error is None
    end = 0
    ends = [end := end + len(piece) for piece in pieces]
    for index, moment in enumerate(record.arrivals):
        complete = stream.index(b"data", len(HEAD)) + sum(len(chunk(text)) for text in texts[: index + 1]) - 1
        assert moment == next(number for number, end in enumerate(ends) if end >= complete)


def test_a_chunked_response_and_carriage_returns_are_understood() -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    body = (chunk("a") + chunk("b", "length") + usage(2, 2) + DONE).replace(b"\n\n", b"\r\n\r\n")
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:33], body[33:]))
    record = received((1.0, head + framed + b"0\r\n\r\n"), lost=False)
    assert (record.characters, record.error, record.output_tokens) == ([1, 1], None, 2)


def test_a_chat_streams_role_is_no_token_and_its_reasoning_is() -> None:
    def delta(finish: str | None = None, **fields: str) -> bytes:
        choices = [{"index": 0, "delta": fields, "finish_reason": finish}]
        return b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"

    record = received(
        (1.0, HEAD + delta(role="assistant", content="")),
        (2.0, delta(reasoning_content="hm")),
        (3.0, delta(content="yes")),
        (4.0, delta("stop") + DONE),
    )
    assert (record.arrivals, record.characters) == ([2.0, 3.0], [2, 3])


@pytest.mark.parametrize(
    ("answer", "error", "detail"),
    [
        (HEAD + chunk("a"), "the stream ended early", ""),
        (HEAD + chunk("a") + DONE, "the stream ended early", ""),
        (HEAD + b"data: {\n\n", "a chunk is not what it should be", "truncated"),
        (HEAD + b'data: {"error": {"code": "x", "message": "the engine"}}\n\n', "error in the stream x", "the engine"),
        (
            b"HTTP/1.1 429 Too Many\r\n\r\n" + b'{"error": {"code": "queue_full", "message": "later"}}',
            "HTTP 429 queue_full",
            "later",
        ),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops", "HTTP 502", "oops"),
        (b"HTTP/1.1 503 Busy\r\n\r\n[1]", "HTTP 503", "[1]"),
        (b"hello?\r\n\r\n", "the answer is not HTTP", ""),
        (b"", "the stream ended early", ""),
    ],
)
def test_a_fault_is_recorded_in_words_that_can_be_counted(answer: bytes, error: str, detail: str) -> None:
    record = received((1.0, answer)) if answer else received()
    assert record.error == error
    assert detail in record.detail


def test_an_error_after_the_end_of_a_choice_still_counts() -> None:
    record = received((1.0, HEAD + chunk("a", "length") + b'data: {"error": {"message": "late"}}\n\n'))
    assert (record.error, record.detail) == ("error in the stream", "late")


def recorded(arrivals: list[float], characters: list[int], counts: list[int] | None = None, **more: object) -> Record:
    counts = counts or [0] * len(arrivals)
    return Record(arrivals=arrivals, characters=characters, token_counts=counts, **more)


def test_the_gap_of_a_chunk_is_shared_by_the_tokens_it_brings() -> None:
    record = recorded([1.0, 1.3, 1.4], [3, 9, 2], [1, 3, 1], output_tokens=5)
    assert inter_token(record) == pytest.approx([100, 100, 100, 100])
    assert samples([record])["between_chunks"] == pytest.approx([300, 100])
    # Were each chunk one token, the mean would be 200 ms for four tokens in 400 ms.
    assert inter_token(record).mean() * 4 == pytest.approx(400)


def test_without_counts_of_the_server_the_surplus_follows_the_length_of_the_texts() -> None:
    assert tokens_of_chunks(recorded([1, 2, 3], [1, 10, 1], output_tokens=3)) == [1, 1, 1]
    assert tokens_of_chunks(recorded([1, 2, 3], [0, 12, 4], output_tokens=7)) == [1, 4, 2]
    assert tokens_of_chunks(recorded([1, 2], [2, 2], output_tokens=3, finish_reason="stop")) == [1, 1]
    assert tokens_of_chunks(recorded([1, 2], [2, 2])) == [1, 1]
    assert tokens_of_chunks(recorded([], [], output_tokens=0)) == []


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 200))
def test_no_token_is_lost_when_they_are_shared_out(characters: list[int], output: int) -> None:
    record = recorded([float(i) for i in range(len(characters))], characters, output_tokens=output)
    counts = tokens_of_chunks(record)
    assert sum(counts) == max(output, len(characters))
    assert min(counts) >= 1


def test_counts_come_from_token_ids_or_from_usage_in_every_chunk() -> None:
    with_ids = received(
        (1.0, HEAD + chunk("ab", choice={"token_ids": [5, 6]})),
        (2.0, chunk("c", "length", choice={"token_ids": [7]}) + usage(1, 3)),
    )
    assert tokens_of_chunks(with_ids) == [2, 1]
    growing = received(
        (1.0, HEAD + chunk("", usage={"prompt_tokens": 1, "completion_tokens": 1})),
        (2.0, chunk("ab", usage={"prompt_tokens": 1, "completion_tokens": 2})),
        (3.0, chunk("c", "length", usage={"prompt_tokens": 1, "completion_tokens": 5}) + usage(1, 5)),
    )
    assert tokens_of_chunks(growing) == [2, 3]


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def test_a_summary_counts_every_request_and_its_percentiles_are_those_of_the_events() -> None:
    good = [
        recorded([0.1 * i, 0.1 * i + 0.03, 0.1 * i + 0.07 + 0.01 * i], [1, 1, 1], sent=0.0, ended=0.2 + 0.1 * i)
        for i in range(1, 9)
    ]
    for record in good:
        record.prompt_tokens, record.output_tokens, record.asked_tokens = 10, 3, 3
    bad = [
        Record(error="HTTP 429 queue_full", detail="later"),
        Record(error="cannot connect"),
        Record(error="HTTP 429 queue_full"),
    ]
    found = summary(Outcome([*good, *bad], seconds=2.0), Objective(350.5, 40.5, None), open_loop=False)
    assert (found["requests"], found["succeeded"], found["failed"]) == (11, 8, 3)
    assert found["errors"] == [
        {"error": "HTTP 429 queue_full", "requests": 2, "example": "later"},
        {"error": "cannot connect", "requests": 1, "example": ""},
    ]
    assert (found["prompt_tokens"], found["output_tokens"]) == (80, 24)
    assert (found["output_tokens_per_second"], found["tokens_per_second"]) == (12, 52)
    firsts = [100.0 * i for i in range(1, 9)]
    gaps = [gap for i in range(1, 9) for gap in (30.0, 40.0 + 10 * i)]
    for name, values in (("first_token", firsts), ("inter_token", gaps), ("whole_request", [200 + f for f in firsts])):
        got = found["latency_ms"][name]
        assert got["count"] == len(values)
        assert got["mean"] == pytest.approx(statistics.fmean(values))
        assert got["max"] == pytest.approx(max(values))
        for q in (50, 90, 95, 99):
            assert got[f"p{q}"] == pytest.approx(percentile(values, q))
    # Mean gaps are 35 + 5 i: one request is within 40.5 ms, and three are within 350.5 ms.
    assert found["goodput"] == {"requests": 1, "share": 1 / 11, "requests_per_second": 0.5}
    assert not found["remarks"]


def test_what_makes_figures_doubtful_is_said() -> None:
    records = [recorded([1.0], [1], asked_tokens=5), recorded([1.0, 2.0], [9, 9], output_tokens=4, asked_tokens=4)]
    found = summary(Outcome(records, seconds=1.0, client_cores=0.95), Objective(), open_loop=True)
    remarks = " ".join(found["remarks"])
    for expected in (
        "1 requests came without usage",
        "in 1 requests chunks brought several",
        "fewer",
        "0.95 of a core",
    ):
        assert expected in remarks


def test_text_and_markdown_say_the_same_even_when_nothing_succeeded() -> None:
    facts = {"url": "U", "model": "M", "arrivals": "1 at a time", "objective": "TTFT 5 ms"}
    outcome = Outcome([Record(error="cannot connect", detail="refused")], seconds=0.5)
    facts |= summary(outcome, Objective(5, None, None), open_loop=True)
    for lines in (list(text(facts)), list(markdown(facts))):
        assert "1 requests to U, model M, 1 at a time: 0 succeeded, 1 failed in 0.50 s" in lines[0]
        assert any("1 x cannot connect, such as: refused" in line for line in lines)
        assert any("0 of 1, 0.0%" in line for line in lines)
        assert any("first token" in line and "-" in line for line in lines)


def test_the_same_seed_draws_the_same_calls_and_another_draws_others() -> None:
    shape = Shape(Span(10, 20), Span(3, 5), shared_prefix=4, rate=5.0, seed=1)
    calls = shape.calls(50)
    assert calls == shape.calls(50)
    assert calls[:10] == shape.calls(10)
    assert not {call.prompt for call in calls} & {call.prompt for call in shape.calls(50, first=1000)}
    assert not {call.prompt for call in calls} & {call.prompt for call in Shape(Span(10, 20), seed=2).calls(50)}
    words = [str(call.prompt).split() for call in calls]
    assert len({tuple(prompt[:4]) for prompt in words}) == 1
    assert len({tuple(prompt[:5]) for prompt in words}) > 10
    assert {len(prompt) for prompt in words} == set(range(10, 21))
    assert {call.output_tokens for call in calls} == {3, 4, 5}


def test_arrivals_are_a_poisson_process() -> None:
    dues = [call.due for call in Shape(Span(1, 1), rate=20.0).calls(4000)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(dues)]
    assert dues[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)
    # Of an exponential distribution: gaps above t seconds are exp(-20 t) of all.
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_token_ids_stay_in_their_range() -> None:
    calls = Shape(Span(30, 30), token_ids=Span(5, 9)).calls(20)
    assert {token for call in calls for token in call.prompt} == {5, 6, 7, 8, 9}
    assert {len(call.prompt) for call in calls} == {30}


def test_a_trace_is_sorted_and_begins_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 105.5, "prompt": "b", "output_tokens": 2}\n\n'
        '{"timestamp": 100, "messages": [{"role": "user", "content": "a"}], "output_tokens": 1}\n'
        '{"timestamp": 101, "prompt_tokens": 4}\n'
    )
    first, second, third = read_trace(path, Shape(output_tokens=Span(7, 7)), chat=True)
    assert (first.due, second.due, third.due) == (0, 1, 5.5)
    assert first.fields(chat=True) == {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert (len(str(second.prompt).split()), second.output_tokens) == (4, 7)
    assert third.fields(chat=True)["messages"] == [{"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "line 2"),
        ("[]", "no JSON object"),
        ('{"prompt": "a"}', "'timestamp'"),
        ('{"timestamp": true, "prompt": "a"}', "'timestamp'"),
        ('{"timestamp": 1}', "'prompt_tokens'"),
        ('{"timestamp": 1, "prompt_tokens": 0}', "'prompt_tokens'"),
        ('{"timestamp": 1, "prompt": "a", "output_tokens": 1.5}', "'output_tokens'"),
        ('{"timestamp": 1, "messages": []}', "--chat"),
    ],
)
def test_a_line_of_a_trace_that_is_wrong_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "prompt": "a"}\n' + line + "\n")
    with pytest.raises(OptionError, match="line 2") as raised:
        read_trace(path, Shape(), chat=False)
    assert problem in str(raised.value)


def test_a_trace_that_is_empty_or_absent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "absent"):
        with pytest.raises(OptionError, match=name):
            read_trace(tmp_path / name, Shape(), chat=False)


def test_a_prefix_longer_than_a_prompt_is_refused() -> None:
    with pytest.raises(OptionError, match="--shared-prefix 9 exceeds the shortest prompt, of 8 tokens"):
        Shape(Span(8, 20), shared_prefix=9).calls(1)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000, "", False)),
        ("http://a/v1", Address("a", 80, "", False)),
        ("https://a.b/llm/v1/", Address("a.b", 443, "/llm", True)),
        ("http://[::1]:9", Address("::1", 9, "", False)),
    ],
)
def test_an_address_may_end_with_v1(url: str, address: Address) -> None:
    assert Address.parse(url) == address


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="no URL"):
        Address.parse(url)
