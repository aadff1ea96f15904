"""Answer each line of standard input as part of a conversation, as text comes: `python examples/chat.py [MODEL]`."""

import sys

from moeserve import LLM, SamplingParams

messages = []
with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        answer = ""
        for output in llm.stream(llm.chat_prompt(messages), SamplingParams(temperature=0, max_tokens=128)):
            text = output.outputs[0].text
            print(text[len(answer) :], end="", flush=True)
            answer = text
        print()
        messages.append({"role": "assistant", "content": answer})
