"""Known formats of prompts, and known chat templates, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from ortlaunch.recipe.fields.section import OTHER_DATA, Section, Text


class PromptTemplate(Section, resume_rule=OTHER_DATA):
    """A text with places for the values of a row: {instruction}, {input} and {system}."""

    template: Text
    """The text before the response, with {instruction}, and where the rows have them {input} and
    {system}."""
    without_input: Text | None = None
    """The text for rows whose input is empty; null: `template`."""

    def fill_template(self, row_values: Mapping[str, str]) -> str:
        """Return the text with the values of a row in their places."""
        template = self.template if row_values["input"] else self.without_input or self.template
        # Other braces, as of JSON, stay; a value is not searched for places.
        return PLACES.sub(lambda placeholder_match: row_values[placeholder_match[1]], template)


# The names are checked by recipe/rules/data_rules.py.
PLACES = re.compile(r"\{(\w+)\}")
PLACE_NAMES = ("instruction", "input", "system")
PromptName = Literal["alpaca"]
# Stanford Alpaca, github.com/tatsu-lab/stanford_alpaca, train.py.
PROMPTS: dict[str, PromptTemplate] = {
    "alpaca": PromptTemplate(
        template="Below is an instruction that describes a task, paired with an input that "
        "provides further context. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        without_input="Below is an instruction that describes a task. Write a response that "
        "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
        "### Response:\n",
    )
}

_EACH = "{% for message in messages %}"
_END = "{% endfor %}"
_ASKS = "{% if add_generation_prompt %}"
_ALTERNATE = (
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('after a system message the roles user and assistant alternate') }}"
    "{% endif %}"
)
# The system message is not a turn of its own.
_SYSTEM_APART = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}"
    "{% endif %}"
)
_EACH_TURN = "{% for message in turns %}" + _ALTERNATE
CHAT_TEMPLATES: dict[str, str] = {
    "chatml": _EACH
    + "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    + f"{_END}{_ASKS}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}",
    "gemma": "{{ bos_token }}"
    + _SYSTEM_APART
    + _EACH_TURN
    + "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}"
    "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ message.content | trim + '<end_of_turn>\n' }}"
    + f"{_END}{_ASKS}{{{{ '<start_of_turn>model\n' }}}}{{% endif %}}",
    "llama3": "{{ bos_token }}"
    + _EACH
    + "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}"
    + f"{_END}{_ASKS}{{{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}}}{{% endif %}}",
    "mistral": "{{ bos_token }}"
    + _SYSTEM_APART
    + _EACH_TURN
    + "{% if message.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}"
    + _END,
    "phi_3": _EACH
    + "{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}"
    + f"{_END}{_ASKS}{{{{ '<|assistant|>\n' }}}}{{% endif %}}",
    "vicuna": "{{ bos_token }}"
    + _SYSTEM_APART
    + '{{ system or "A chat between a curious user and an artificial intelligence assistant. The '
    "assistant gives helpful, detailed, and polite answers to the user's questions.\" }}"
    + _EACH_TURN
    + "{% if message.role == 'user' %}{{ ' USER: ' + message.content }}"
    "{% else %}{{ ' ASSISTANT: ' + message.content + eos_token }}{% endif %}"
    + f"{_END}{_ASKS}{{{{ ' ASSISTANT:' }}}}{{% endif %}}",
    "zephyr": _EACH
    + "{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}"
    + f"{_END}{_ASKS}{{{{ '<|assistant|>\n' }}}}{{% endif %}}",
}
