"""Rows of traces made by hand."""

SYSTEM = {"role": "system", "content": "You book flights. " * 20}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def call(session: str, mode: str, *messages: dict, answer: str = "Sure.") -> dict:
    """A model call: the whole prompt ('full'), or what it adds ('delta')."""
    output = {"role": "assistant", "content": answer}
    return {"session": session, "turn": 0, "mode": mode, "messages": list(messages), "output": output}


def block_row(*ids: int, num_answer_tokens: int = 5) -> dict:
    """A request whose prompt has these whole blocks of 32 tokens."""
    return {
        "input_tokens": 32 * len(ids),
        "output_tokens": num_answer_tokens,
        "hash_ids": ids,
        "block_tokens": 32,
    }
