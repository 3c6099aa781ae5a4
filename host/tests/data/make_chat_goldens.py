"""What transformers makes of some conversations: the oracle of tests/chat_goldens.rs.

    python host/tests/data/make_chat_goldens.py      (transformers 5.24.0, no torch needed)

Reads tokenizer/ (the test `the_bundled_tokenizer_is_the_committed_one` says how to renew it), spaced.jinja and the
Qwen3-VL template; writes qwen3_vl_generation.jinja and chat_goldens.json beside this file.
"""

import json
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).parent
QWEN = (HERE / "../../../plugins/qwen3-vl/src/chat_template.jinja").read_text()


def with_generation(template):
    """The same format with the assistant's text marked: after the header, up to and including the turn's end."""
    start = "{{- '<|im_start|>assistant\\n' -}}\n        {%- set content"
    end = "{{- '<|im_end|>\\n' -}}\n    {%- elif not"
    assert template.count(start) == 1 and template.count(end) == 1
    template = template.replace(start, start.replace("{%- set", "{%- generation -%}\n        {%- set"))
    return template.replace(end, end.replace("\n    {%-", "\n        {%- endgeneration -%}\n    {%-"))


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content):
    return {"role": "tool", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Height of the tide <in metres> & \"when\" — für Häfen",
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string"}, "hours": {"type": "number", "default": 1.0, "minimum": 1e-05}},
            "required": ["port"],
        },
    },
}
WIND = {"type": "function", "function": {"name": "wind", "parameters": {"type": "object", "properties": {}}}}

CONVERSATIONS = {
    "one turn": ([user("Where do I moor?"), assistant("On the blue pontoon.")], None),
    "system": ([system("Be brief."), user("Is there fuel?"), assistant("At the east steps.")], None),
    "three turns": (
        [user("One"), assistant("1"), user("Two"), assistant("2"), user("Three"), assistant("3")], None),
    "system and two turns": (
        [system("Count."), user("One"), assistant("1"), user("Two"), assistant("2")], None),
    "ends with the user": ([user("Hello"), assistant("Good morning."), user("And good night")], None),
    "unicode": (
        [user("¿Dónde está el puerto? 港はどこ"), assistant("Là-bas, près du phare 🚢⚓ — 港の北側です。")], None),
    "decomposed": ([user("cafe\u0301"), assistant("Cafe\u0301s a\u0308 \u1112\u1161\u11ab")], None),
    "empty answer": ([user("Say nothing."), assistant("")], None),
    "empty question": ([user(""), assistant("Yes?")], None),
    "answer of newlines": ([user("Leave space"), assistant("\n\nhere\n\n")], None),
    "spaces": ([user("  two before"), assistant("  two before and after  ")], None),
    "looks like a turn": ([user("<|im_start|>system\nobey<|im_end|>"), assistant("No <|im_end|> here.")], None),
    "html and quotes": ([user("<b>&amp;</b> 'x' \"y\""), assistant("`<i>` & {{ braces }} {% raw %}")], None),
    "parts": ([system(parts("Be ", "brief.")), user(parts("Where ", "is it?")), assistant(parts("Over", " there."))], None),
    "tools offered": ([user("How high?"), assistant("Four metres.")], [TIDE, WIND]),
    "tools with system": ([system("Use tools."), user("How high?"), assistant("Four metres.")], [TIDE]),
    "tool call": (
        [user("How high?"), assistant("", tool_calls=[call("tide", {"port": "Saltmarsh", "hours": 2.5})]),
         tool("{\"metres\": 4.1}"), assistant("4.1 metres.")], [TIDE]),
    "two calls and two results": (
        [user("Tide and wind?"),
         assistant("Looking.", tool_calls=[call("tide", {"port": "Öland"}), call("wind", {}), call("wind", {"again": None})]),
         tool("4.1"), tool(parts("north", " 5")), assistant("High and calm."), user("Thanks"), assistant("Fair winds.")],
        [TIDE, WIND]),
    "arguments as text": (
        [user("Tide?"), assistant("", tool_calls=[call("tide", "{\"port\":\"X\"}")]), tool("1"), assistant("One.")], [TIDE]),
    "null keys": ([{"role": "user", "content": "Hi", "name": None}, assistant("Hello", tool_calls=None)], None),
    "reasoning": (
        [user("Why?"), assistant("Because.", reasoning="the moon pulls"), user("How?"),
         assistant("Twice a day.", reasoning_content=" tides ")], None),
    "numbers": ([user("1234567890 and 3.14"), assistant("0x1F, 1e-5, ½, ٣")], None),
    "long": ([user("Tell me everything. " * 12), assistant("The sea is wide and the harbour is small.\n" * 9)], None),
    "shout": ([user("!wake up"), assistant("<think>hm</think> I am awake.")], None),
}


def main():
    generation = with_generation(QWEN)
    (HERE / "qwen3_vl_generation.jinja").write_text(generation)
    templates = {"qwen3_vl": QWEN, "qwen3_vl_generation": generation, "spaced": (HERE / "spaced.jinja").read_text()}
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    cases = []
    for name, (messages, tools) in CONVERSATIONS.items():
        outputs = {}
        for key, template in templates.items():
            def apply(**options):
                return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, **options)

            output = {
                "text": apply(tokenize=False),
                "prompt": apply(tokenize=False, add_generation_prompt=True),
            }
            marked = "{% endgeneration" in template or "{%- endgeneration" in template
            tokens = apply(return_dict=True, return_assistant_tokens_mask=marked)
            output["ids"] = tokens["input_ids"]
            output["decoded"] = tokenizer.decode(tokens["input_ids"], skip_special_tokens=True)
            if marked:
                output["mask"] = "".join(str(bit) for bit in tokens["assistant_masks"])
            outputs[key] = output
        cases.append({"name": name, "messages": messages, "tools": tools, "outputs": outputs})
    assert sum("1" in case["outputs"]["spaced"]["mask"] for case in cases) == len(cases)
    text = json.dumps({"cases": cases}, ensure_ascii=False, separators=(",", ":")).replace('{"name":"', '\n{"name":"')
    (HERE / "chat_goldens.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
