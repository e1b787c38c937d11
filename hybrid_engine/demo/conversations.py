"""What the demo's agents talk about: one text that all of them begin with, and each one's questions.

The model completes text, it was not trained to chat. So the prompts are written as a transcript that it goes on with,
and an answer ends at the end of its line.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HANDBOOK = """\
THE HARBOUR MUSEUM OF SELLING BAY: A HANDBOOK FOR ASSISTANTS

1. The house. The museum stands on the east quay of Selling Bay, in a rope works built in 1847. The rope works \
closed in 1903, and for eight years the long hall stood empty but for gulls. In 1911 the harbour master, Edith \
Calloway, bought it for two hundred pounds and opened the museum on the first day of May. The long hall is 212 \
metres long, because a rope can only be as long as the hall in which it is laid. The roof was replaced with slate \
in 1958 after the great storm. The museum is closed on Mondays. On all other days it opens at ten in the morning \
and closes at five in the afternoon, in July and August at seven in the evening.

2. Tickets. A ticket for an adult costs six pounds. Children below twelve pay nothing. Students and sailors pay \
three pounds if they show a card. A ticket is good for two days, because nobody sees the whole house in one. \
Groups of more than ten should write a week ahead, so that a guide can be found. Dogs are welcome in the yard but \
not in the house.

3. The ships. The largest ship is the Marigold, a wooden herring drifter built in Lowestoft in 1896. She has two \
masts and a steam capstan, and she carried a crew of nine. In her best week, in October 1907, she landed forty \
tons of herring. The smallest boat is the Wren, a rowing boat of three metres in which the lifeboat man Tom Abbot \
saved five people from the steamer Corinth on the night of the fourth of January 1922. The Wren may be touched, \
the Marigold may not, because her paint is the first one and very thin. A third ship, the tug Hercules, lies \
afloat in front of the museum, and her engine is run on the first Sunday of every month.

4. The light. The lamp in the tower came from the lighthouse on Gannet Rock. It was made in Paris in 1869 by the \
firm of Barbier. Its lens weighs two tons, floats in a basin of mercury, and could once be seen at a distance of \
twenty-one miles. The keeper climbed one hundred and forty-three steps to wind the clockwork, every four hours, \
until electricity came in 1934. Visitors may climb the tower in groups of six. The last climb begins at four in \
the afternoon.

5. The knots. In the net loft there are three hundred knots on a wall, each with its name. The oldest is a reef \
knot from a ship that sank in 1712. Every Saturday at two the retired sailmaker Ruth Penrose teaches five knots to \
anyone who comes: the bowline, the clove hitch, the sheet bend, the figure of eight and the rolling hitch. She \
says that a good knot holds when it must and opens when it should.

6. The kitchen. The tea room in the old tar house serves fish soup, brown bread and seed cake. The soup is made \
from the catch of the morning and is usually gone by half past one. The recipe of the seed cake came from Edith \
Calloway's mother and uses caraway, lemon and a spoon of brandy.

7. How assistants answer. An assistant answers in one short sentence, says only what this handbook says, and is \
polite. If the handbook does not say it, the assistant says that a member of the staff will be glad to help.

What follows are transcripts of conversations with the museum's assistants.

"""


@dataclass
class Conversation:
    """One agent's transcript; it grows by a question and an answer each turn."""

    agent: str
    questions: tuple[str, ...]
    example: tuple[str, str]
    """A question and its answer that show the agent's way of speaking."""
    transcript: str = field(init=False)
    prompts: list[str] = field(default_factory=list)
    """One for each question asked so far."""

    def __post_init__(self) -> None:
        question, answer = self.example
        self.transcript = (
            f"{HANDBOOK}Conversation with the {self.agent}.\nVisitor: {question}\n{self.agent}: {answer}\n"
        )

    def prompt(self, turn: int) -> str:
        """Return all that was said before a turn and its question, up to where the answer begins."""
        if turn == len(self.prompts):
            self.prompts.append(f"{self.transcript}Visitor: {self.questions[turn]}\n{self.agent}:")
        return self.prompts[turn]

    def answer(self, turn: int, text: str) -> None:
        """Take an answer exactly as it was generated, so that the next prompt extends this one."""
        self.transcript = f"{self.prompts[turn]}{text}\n"


def make_conversations() -> list[Conversation]:
    """Return three agents' conversations, each at its beginning."""
    return [
        Conversation(
            "Guide",
            (
                "Which is the largest ship?",
                "How many people were in her crew?",
                "What did she land in her best week?",
            ),
            ("May I touch the Wren?", "Yes, the Wren may be touched."),
        ),
        Conversation(
            "Keeper",
            (
                "Where did the lamp in the tower come from?",
                "How heavy is its lens?",
                "When does the last climb begin?",
            ),
            ("When did electricity come?", "Electricity came in 1934."),
        ),
        Conversation(
            "Doorman",
            (
                "On which day is the museum closed?",
                "What does a ticket for an adult cost?",
                "Who founded the museum?",
            ),
            ("Are dogs welcome?", "Dogs are welcome in the yard but not in the house."),
        ),
    ]
