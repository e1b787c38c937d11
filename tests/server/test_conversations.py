"""What conversations left behind is remembered within a bound."""

from hybrid_engine.server.conversations import ConversationLog, names_of

NAMES = names_of("", [{"role": "user", "content": str(turn)} for turn in range(3)], None)


def test_a_prompt_that_begins_as_its_past_does_not_diverge():
    log = ConversationLog()
    log.remember(NAMES[0], [1, 2, 3, 4, 5], answer_start=3)
    assert log.check(NAMES, [1, 2, 3, 4, 5, 6]) is None


def test_a_changed_answer_is_told_from_a_changed_prompt():
    log = ConversationLog()
    log.remember(NAMES[0], [1, 2, 3, 4, 5, 6], answer_start=3)
    changes = [log.check(NAMES, token_ids) for token_ids in ([1, 9, 3, 4, 5, 6, 7], [1, 2, 3, 9, 5, 6, 7])]
    assert [(each.where, each.at_token, each.num_messages) for each in changes] == [("prompt", 1, 1), ("answer", 3, 1)]


def test_the_least_recently_used_are_forgotten_by_their_bytes():
    log = ConversationLog(max_bytes=2_000)
    past = list(range(100))  # 400 bytes and as much for the entry: two fit
    for name in NAMES[:2]:
        log.remember(name, past, answer_start=90)
    changed = [*past[:50], 0]
    assert log.check(NAMES[:2], changed) is not None  # the first is used, so the second goes
    log.remember(NAMES[2], past, answer_start=90)
    assert log.check(NAMES[:2], changed) is not None
    assert log.check([b"", NAMES[1], b""], changed) is None
