"""A model that reasons and calls tools as far as grammars make it: template, tags, tools."""

from __future__ import annotations

from typing import Any

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """
{%- if tools %}<|user|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {
{%- for name, value in call.function.arguments.items() %}"{{ name }}": {{ value | tojson }}
{%- endfor %}}}</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
USER: Any = {"role": "user", "content": "Rain in Rome?"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}, "dry": {"type": "boolean"}},
    "required": ["city", "dry"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "now": NOW}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich", "dry": true}}'


def written(text: str) -> dict[str, Any]:
    """Return the grammar by which the model writes `text`."""
    return {"structural_tag": {"format": {"type": "const_string", "value": text}}}
