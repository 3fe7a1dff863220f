import openai
import pytest
from support.live import Live

USER = {"role": "user", "content": "Say something."}


def test_a_chat_answer_has_the_documented_shape(live: Live) -> None:
    answer = live.chat(messages=[USER], max_tokens=8, temperature=0)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["refusal"] is None
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8


def test_c21_the_prompt_is_the_models_template_tokenised_once(live: Live) -> None:
    template = live.service.template
    assert template is not None
    ids = live.tokenizer.encode(template.render([USER], add_generation_prompt=True), add_special_tokens=False)
    answer = live.chat(messages=[USER], max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    raw = live.completion(prompt=ids, max_tokens=4)
    assert raw["choices"][0]["text"] == answer["choices"][0]["message"]["content"]


def test_b12_a_stream_says_the_role_once_then_content_then_the_reason(live: Live) -> None:
    chunks = live.stream("/v1/chat/completions", messages=[USER], max_tokens=12, n=2)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(choice["delta"].keys() == {"content"} and choice["delta"]["content"] for choice in own[1:-1])
        assert own[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_a19_choices_stops_and_limits_are_honoured(live: Live) -> None:
    whole = live.chat(messages=[USER], max_tokens=30, seed=1)["choices"][0]["message"]["content"]
    middle = whole[len(whole) // 2]
    answer = live.chat(messages=[USER], max_tokens=30, n=2, stop=[middle], seed=1)
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["message"]["content"] == whole[: whole.index(middle)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", middle)


def test_a25_a_large_limit_is_an_upper_bound(live: Live) -> None:
    prompt = live.chat(messages=[USER], max_tokens=1)["usage"]["prompt_tokens"]
    answer = live.chat(messages=[USER], max_tokens=65_535)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["total_tokens"] <= 2048
    assert answer["usage"]["prompt_tokens"] == prompt


def test_the_newer_name_of_the_limit_wins(live: Live) -> None:
    answer = live.chat(messages=[USER], max_tokens=3, max_completion_tokens=5)
    assert answer["usage"]["completion_tokens"] == 5


def test_c01_c06_logprobs_have_real_text_and_bytes(live: Live) -> None:
    (choice,) = live.chat(messages=[USER], max_tokens=6, logprobs=True)["choices"]
    assert choice["logprobs"]["refusal"] is None
    assert len(choice["logprobs"]["content"]) == 6
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert data.decode(errors="replace") == choice["message"]["content"]
    (choice,) = live.chat(messages=[USER], max_tokens=6, logprobs=True, top_logprobs=3)["choices"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in choice["logprobs"]["content"])
    assert not any("Ġ" in entry["token"] for entry in choice["logprobs"]["content"])
    refused = live.post("/v1/chat/completions", messages=[USER], top_logprobs=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")


def test_text_parts_are_joined_and_other_parts_refused(live: Live) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "something."}]
    joined = live.chat(messages=[{"role": "user", "content": parts}], max_tokens=5)
    assert joined["choices"][0]["message"] == live.chat(messages=[USER], max_tokens=5)["choices"][0]["message"]
    image = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]
    refused = live.post("/v1/chat/completions", messages=[{"role": "user", "content": image}])
    assert refused.status_code == 400
    assert "only text" in refused.json()["error"]["message"]
    assert "169.254" not in refused.text


def test_a_message_can_be_continued(live: Live) -> None:
    messages = [USER, {"role": "assistant", "content": "Well, the"}]
    open_ended = live.chat(messages=messages, max_tokens=4, continue_final_message=True, add_generation_prompt=False)
    closed = live.chat(messages=messages, max_tokens=4)
    assert open_ended["usage"]["prompt_tokens"] < closed["usage"]["prompt_tokens"]
    both = live.post("/v1/chat/completions", messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


def test_the_official_client_reads_chats_and_streams(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Say something."}]
        answer = client.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=10, logprobs=True, top_logprobs=2
        )
        text = answer.choices[0].message.content
        assert text
        end = text[len(text) // 2 :]
        with client.chat.completions.stream(model="smollm2", messages=messages, max_tokens=10, stop=[end]) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == text[: text.index(end)]
        assert final.choices[0].message.role == "assistant", "B12: the role comes once"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="smollm2", messages=[])
