"""A drafter of your own, for answers close to a text that you have, as when a file is edited.

python examples/custom_drafter.py
"""

from slipstream import LLM, SamplingParams

MATCH = 3  # tokens that have to agree before the text is taken up again


class ExpectedText:
    """Guesses that an answer goes on as `expected` does after the answer's last tokens."""

    def __init__(self, expected):
        self.follows = {}
        for place in range(MATCH, len(expected)):
            self.follows.setdefault(tuple(expected[place - MATCH : place]), expected[place:])

    def guess(self, requests):
        return [self.follows.get(request.token_ids[-MATCH:], []) for request in requests]


def main():
    prompt, params = "class Stack:\n", SamplingParams(temperature=0, max_tokens=64)
    plain = LLM("demo").generate([prompt], params)[0].outputs[0]
    drafter = {
        "method": "custom",
        "model": "custom_drafter:ExpectedText",
        "num_speculative_tokens": 7,
        "options": {"expected": list(plain.token_ids)},
    }
    output = LLM("demo", speculative_config=drafter).generate([prompt], params)[0]
    assert output.outputs[0].text == plain.text  # whatever is guessed
    print(f"{len(plain.token_ids)} tokens in {output.metrics.num_steps} steps")


if __name__ == "__main__":
    main()
