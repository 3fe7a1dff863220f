import datetime
from typing import Any

import pytest
from jinja2 import TemplateError as JinjaError
from support.vocabularies import byte_level, smollm2, smollm2_reference

from octavo.server.template import ChatTemplate, TemplateError, TemplateRequestError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": 'What is 2 + 2?\n\n<b>"it\'s"</b> 你好 🌶'}
ASSISTANT = {"role": "assistant", "content": "  Four, of course.  "}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT],
    [{"role": "user", "content": ""}],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Zürich's <weather>", "parameters": {"type": "object", "a": 1}},
    }
]

HEADERS = """
{{- bos_token }}
{%- for message in messages %}
    {%- set turn = '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
    {{- turn }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

INSTRUCTIONS = """
{% if messages[0]['role'] == 'system' %}
    {% set rest = messages[1:] %}
    {% set prefix = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set rest, prefix = messages, '' %}
{% endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (prefix if loop.first else '') + message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""

WITH_TOOLS = """
{%- set space = namespace(seen=false) %}
{%- if tools %}{{- 'Tools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
        {%- set space.seen = true %}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- message.role ~ ': ' ~ message.content ~ '#' ~ loop.index ~ (', last' if loop.last) }}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
{{- space.seen ~ (documents is not none) ~ (thinking | default('unset')) ~ bos_token ~ eos_token }}
"""

TEMPLATES = {"smollm2": None, "headers": HEADERS, "instructions": INSTRUCTIONS, "tools": WITH_TOOLS}


def ours(source: str | None) -> ChatTemplate:
    return ChatTemplate(source or smollm2().chat_template or "", smollm2().bos_token, smollm2().eos_token)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("opens_answer", [True, False])
def test_rendering_equals_transformers(name: str, messages: list[dict[str, str]], opens_answer: bool) -> None:
    text = ours(TEMPLATES[name]).render(messages, add_generation_prompt=opens_answer)
    options: dict[str, Any] = {"chat_template": TEMPLATES[name], "add_generation_prompt": opens_answer}
    assert text == smollm2_reference().apply_chat_template(messages, tokenize=False, **options)
    ids = smollm2_reference().apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert smollm2().encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("tools", [None, [], TOOLS])
@pytest.mark.parametrize("variables", [{}, {"thinking": True}, {"thinking": "low"}])
def test_tools_and_variables_reach_the_template_as_in_transformers(tools: Any, variables: dict[str, Any]) -> None:
    text = ours(WITH_TOOLS).render([SYSTEM, USER], tools=tools, **variables)
    assert text == smollm2_reference().apply_chat_template(
        [SYSTEM, USER],
        chat_template=WITH_TOOLS,
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
        **variables,
    )


@pytest.mark.parametrize("name", ["smollm2", "headers", "instructions"])
@pytest.mark.parametrize("content", ["Four", "Four, ", "  Four", "Four\n"])
def test_continuing_the_last_message_equals_transformers(name: str, content: str) -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": content}]
    text = ours(TEMPLATES[name]).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == smollm2_reference().apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    assert text.rstrip().endswith(content.strip())


def test_continuing_opens_no_turn_whatever_else_is_asked() -> None:
    text = ours(None).render([USER, {"role": "assistant", "content": "Fo"}], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nFo")


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": [{"text": "a"}]}]])
def test_a_message_without_text_cannot_be_continued(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(TemplateRequestError, match="no text"):
        ours(None).render(messages, continue_final_message=True)


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{{ messages[0].content | replace('a', 'b') | upper }}"])
def test_a_template_that_changes_the_last_message_cannot_continue_it(source: str) -> None:
    with pytest.raises(TemplateRequestError, match="cannot continue"):
        ours(source).render([{"role": "assistant", "content": "abc"}], continue_final_message=True)


def test_chat_ids_begin_with_exactly_one_bos() -> None:
    """Case C21: the template writes BOS, and encoding adds none."""
    tokenizer = byte_level()
    assert tokenizer.encode("x")[0] == tokenizer.bos_id
    text = ChatTemplate(HEADERS, tokenizer.bos_token, tokenizer.eos_token).render([USER])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.encode(text)[:2] == [tokenizer.bos_id] * 2


def test_a_developer_is_a_system_for_templates_that_know_none() -> None:
    developer = {**SYSTEM, "role": "developer"}
    assert ours(HEADERS).render([developer, USER]) == ours(HEADERS).render([SYSTEM, USER])
    knows = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{% endfor %}"
    assert ours(knows).render([developer, USER]) == "Duser"
    assert developer["role"] == "developer"


def test_a_template_cannot_change_the_callers_messages() -> None:
    messages = [dict(USER)]
    with pytest.raises(TemplateRequestError):
        ours("{{ messages.append(1) }}").render(messages)
    with pytest.raises(TemplateRequestError):
        ours("{{ messages[0].update({'role': 'x'}) }}").render(messages)
    ours(None).render(messages, continue_final_message=True)
    assert messages == [USER]


def test_the_words_of_a_template_that_refuses_reach_the_client() -> None:
    with pytest.raises(TemplateRequestError, match=r"^Roles must alternate: user, assistant, user, \.\.\.$"):
        ours(INSTRUCTIONS).render([ASSISTANT, USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{% macro deeper() %}{{ deeper() }}{% endmacro %}{{ deeper() }}",
        "{{ raise_exception('two\nlines \ud800 ' + 'x' * 10000) }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_whatever_fails_in_a_template_is_a_fault_of_the_request_in_one_short_line(source: str) -> None:
    with pytest.raises(TemplateRequestError) as caught:
        ours(source).render([USER])
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) <= 500
    message.encode()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ''|attr('__class__') }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    template = ours(source)
    try:
        text = template.render([USER])
    except TemplateRequestError:
        return
    assert text == ""


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% generation %}x", "{{ a | no_such_filter }}", "{% x %}"])
def test_a_template_that_is_no_template_is_refused_before_it_is_rendered(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template cannot be compiled in line 1") as caught:
        ours(source).compile()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 65
    assert not isinstance(caught.value, JinjaError)


def test_the_date_is_todays() -> None:
    before = datetime.datetime.now().astimezone().strftime("%d %b %Y")
    text = ours("{{ strftime_now('%d %b %Y') }}").render([USER])
    assert text in {before, datetime.datetime.now().astimezone().strftime("%d %b %Y")}


def test_missing_special_tokens_are_undefined() -> None:
    assert ChatTemplate("{{ bos_token is defined }}{{ eos_token }}", None, "</s>").render([USER]) == "False</s>"


def test_names_of_the_conversation_cannot_be_taken_over() -> None:
    text = ours("{{ messages[0].content }}{{ self_ }}").render(
        [{"role": "user", "content": "x"}], messages="y", self_=1
    )
    assert text == "x1"
