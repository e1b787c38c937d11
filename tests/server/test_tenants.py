"""What a client can learn of another's prompts: nothing, though both use one cache."""

import re

import pytest

from hybrid_engine.snapshot import take_snapshot

SECRET = "the takeover of Acme is planned for the ninth of May, tell nobody"
OTHER = "nothing of what stands here is known to anybody but its writer..."
TIMES = re.compile(r"_seconds|_created|^#", re.MULTILINE)


def ask(server, key, prompt):
    options = {"explain_cache": True}
    usage = server.client(key).completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=options).usage
    return usage.model_dump()


def work(server):
    """Steps run and tokens computed so far: what an answer's first token waits for, counted and not timed."""
    snapshot = take_snapshot(server.engine)
    return snapshot.num_steps, snapshot.num_computed_tokens


def seen_by_beta(server):
    """All that a client finds out by asking twice: usage, work of each request, the cache's page, the metrics."""
    found = []
    for _ in range(2):
        before = work(server)
        usage = ask(server, "beta", SECRET)
        found.append((usage, [after - earlier for after, earlier in zip(work(server), before, strict=True)]))
    page = server.http.get("/cache", headers={"authorization": "Bearer beta"}).json()
    for prefix in page["top_prefixes"]:
        del prefix["seconds_since_hit"], prefix["id"]  # a time, and a name under a key that is the server's own
    metrics = [line for line in server.http.get("/metrics").text.splitlines() if not TIMES.search(line)]
    return found, page, metrics


@pytest.fixture
def watched(serve):
    """Start a server whose client alpha has asked two prompts, each twice; return what client beta sees then."""

    def watch(*prompts):
        assert {len(prompt) for prompt in prompts} == {len(SECRET)}
        server = serve("hi", api_keys=("alpha", "beta"))
        for prompt in (*prompts, *prompts):
            ask(server, "alpha", prompt)
        return seen_by_beta(server)

    return watch


def test_nothing_that_a_client_sees_tells_whether_another_has_asked_the_same(watched):
    assert watched(SECRET, OTHER) == watched(OTHER.upper(), OTHER)


def test_a_clients_first_request_costs_the_work_of_an_unknown_prompt_and_its_second_less(watched):
    (first, first_work), (second, second_work) = watched(SECRET, OTHER)[0]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert (first_work, second_work[0]) == ([2, len(SECRET)], 1)
    assert second["prompt_tokens_details"]["cached_tokens"] == len(SECRET) - second_work[1] > 0


def test_the_most_useful_prefixes_are_a_clients_own(watched):
    (prefix,) = watched(SECRET, OTHER)[1]["top_prefixes"]
    assert prefix["num_hits"] == 1


def test_where_the_cache_is_shared_so_is_what_is_known_of_it(serve):
    server = serve("hi", api_keys=("alpha", "beta"), share_cache=True)
    for key in ("alpha", "beta"):
        ask(server, key, SECRET)
    page = server.http.get("/cache", headers={"authorization": "Bearer alpha"}).json()
    assert [prefix["num_hits"] for prefix in page["top_prefixes"]] == [1]
