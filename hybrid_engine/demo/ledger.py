"""What the second demo asks about: one text with facts that nobody can guess, and the questions."""

from __future__ import annotations

FACTS = {
    ("code", "Belora"): "4071",
    ("price", "Gravit"): "938",
    ("friend", "Tuna"): "plosi",
    ("room", "Sheko"): "20516",
    ("secret", "Dralin"): "vatu",
    ("ship", "Moki"): "grifen",
    ("number", "Haso"): "7745",
    ("horse", "Plenu"): "ruth",
    ("key", "Zabid"): "61380",
    ("song", "Frito"): "mewal",
    ("street", "Kulap"): "552",
    ("sign", "Wevi"): "30927",
}
"""(what, of whom): the answer."""

PROSE = (
    "The fair had been held upon the green beside the river for as long as anybody in the village could remember, and "
    "every year the clerk sat at a table under the great elm and wrote down what was told him. He was an old man, and "
    "he wrote slowly; but he had never been known to make a mistake.",
    "In the morning it had rained, and the road from the bridge was so deep in mud that two carriages were obliged to "
    "turn back. By ten o'clock, however, the sun was out, and the ladies began to arrive.",
    "There was a man with a dancing bear, and another who sold ribbons, and a third who would tell your fortune for a "
    "penny and your character for two.",
    "The colonel walked about with his hands behind him, and said to everyone he met that there were not so many "
    "people as last year. He had said the same last year.",
    "At noon the band played. It was not a good band, but it was a loud one, and the children marched behind it all "
    "the way to the mill.",
    "A farmer who had drunk too much ale fell into the river, and was pulled out again by his own dog, at which there "
    "was a great deal of laughter.",
    "The old countess did not come herself, but sent her nephew with a basket of pears and a letter, which was read "
    "aloud and very much admired.",
    "Two boys had a quarrel about a kite. The parson took it away from them both, and was seen an hour later, flying "
    "it behind the church.",
    "In the afternoon there were races. The favourite stood still at the second fence and could not be persuaded to "
    "go on, so that the prize went to a grey mare whom nobody had thought of.",
    "Towards evening the wind rose, and one of the tents was carried over the hedge, with the tea still in it.",
    "When the lamps were lit the clerk was still writing. His daughter brought him a cup of soup, which he did not "
    "touch until the page was full.",
    "Then there was dancing, and the last of the carriages did not leave until after midnight. The clerk shut his "
    "book, put on his hat, and went home by the path along the river.",
)


def ledger() -> str:
    """Return the text: prose with a fact behind each paragraph."""
    said = (f"The {what} of {name} is {value}." for (what, name), value in FACTS.items())
    return "".join(f" {prose} {fact}" for prose, fact in zip(PROSE, said, strict=True))


def questions() -> list[tuple[str, str]]:
    """Return each question and its answer."""
    return [(f"What is the {what} of {name}?", f"{value}.") for (what, name), value in FACTS.items()]
