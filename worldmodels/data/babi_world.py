"""A world of people, places and things, told in the words of bAbI: tasks 1, 2, 3, 6, 7 and 8 (Weston et al. 2015).

People go from place to place, pick things up, put them down, and give them to each other. ``answer`` knows the state of that
world after any sentences of these tasks, the official ones too; ``tell`` makes stories of our own.
"""

from collections.abc import Sequence
from random import Random

from .babi import Question, Told, Words

NUMBERS = (1, 2, 3, 6, 7, 8)
PEOPLE = ("mary", "john", "sandra", "daniel")
PLACES = ("kitchen", "bedroom", "garden", "hallway", "office", "bathroom")
THINGS = ("apple", "milk", "football")
COUNTS = ("none", "one", "two", "three")

_GO = ("went to", "journeyed to", "travelled to", "moved to", "went back to")
_GET = ("got", "took", "picked up", "grabbed")
_DROP = ("dropped", "left", "discarded", "put down")
_GIVE = ("gave", "handed", "passed")
_ACTIONS = {1: ("go",), 7: ("go", "get", "drop", "give")}  # the others: go, get and drop
_THERE = 0.2  # of the sentences that may end in "there"
_PUT_DOWN = 0.87  # of the questions where a thing was before, so many wait until no one has it
_EARLIER = 0.2  # of the questions where a thing was before, so many ask of a place before the last one, and so on
_RECENT = 5  # sentences, in the last of which such a question has its newest support
_ASKED = 5  # questions of a story
_BETWEEN = 2  # sentences before a question may be asked


class World:
    """Who is where and has what, as far as sentences have told.

    Attributes:
        place: of each person, by name.
        holder: of each thing that someone has.
        carried: the things each person has, in the order in which each first came to that person.
        history: of each thing, the places it has been at one after another, with the sentences that brought it there.
    """

    def __init__(self) -> None:
        self.told = 0
        self.place: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.carried: dict[str, list[str]] = {}
        self.history: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        self.seen: dict[str, list[str]] = {}  # all things a person ever had, in this order
        self.moved: dict[str, int] = {}  # the sentence that told a person's place
        self.handled: dict[str, int] = {}  # the sentence that told who has a thing, or that no one has
        self.taken: dict[str, int] = {}  # the sentence that told who has a thing, or had it last
        self.events: dict[str, list[int]] = {}  # the sentences about what a person has

    def hear(self, sentence: Words) -> None:
        """Take in a sentence.

        Raises:
            ValueError: it is none of this world.
        """
        who, said, at = sentence[0], " ".join(sentence[1:]), self.told
        for verb in _GO:
            if said.startswith(f"{verb} the "):
                self.place[who], self.moved[who] = sentence[-1], at
                for thing in self.carried.get(who, ()):
                    self._is_now(thing, sentence[-1], (self.handled[thing], at))
                break
        else:
            things = [word for word in sentence if word in THINGS]
            if things and said.startswith(_GIVE):
                self._leave(who, things[0], at)
                self._take(sentence[-1], things[0], at)
            elif things and said.startswith(_GET):
                self._take(who, things[0], at)
            elif things and said.startswith(_DROP):
                self._leave(who, things[0], at)
            else:
                raise ValueError(f"no sentence of this world: {' '.join(sentence)}")
        self.told += 1

    def _take(self, who: str, thing: str, at: int) -> None:
        self.holder[thing], self.handled[thing], self.taken[thing] = who, at, at
        seen = self.seen.setdefault(who, [])
        if thing not in seen:
            seen.append(thing)
        self.carried[who] = sorted([*self.carried.get(who, []), thing], key=seen.index)
        self.events.setdefault(who, []).append(at)
        if who in self.place:
            self._is_now(thing, self.place[who], (at, self.moved[who]))

    def _leave(self, who: str, thing: str, at: int) -> None:
        self.handled[thing] = at
        self.holder.pop(thing, None)
        if thing in self.carried.get(who, ()):
            self.carried[who].remove(thing)
        self.events.setdefault(who, []).append(at)
        if who in self.place:
            self._is_now(thing, self.place[who], (at, self.moved[who]))

    def _is_now(self, thing: str, place: str, because: tuple[int, ...]) -> None:
        history = self.history.setdefault(thing, [])
        if not history or history[-1][0] != place:
            history.append((place, because))

    def where(self, thing: str) -> str | None:
        """Where a thing is; None if that was not told."""
        history = self.history.get(thing)
        return history[-1][0] if history else None


def answer(number: int, sentences: Sequence[Words], question: Words) -> str:
    """The answer to a question of a task after some sentences.

    Raises:
        ValueError: sentences or a question that are none of this world, or a question that they do not answer.
    """
    world = World()
    for sentence in sentences:
        world.hear(sentence)
    return _answer(number, world, question)


def _answer(number: int, world: World, question: Words) -> str:
    about = question[-1]
    if number == 1 and about in world.place:
        return world.place[about]
    if number == 2 and (place := world.where(about)):
        return place
    if number == 3:
        history = [place for place, _ in world.history.get(question[3], ())]
        if about in history:
            last = len(history) - 1 - history[::-1].index(about)
            if last:
                return history[last - 1]
    if number == 6 and question[1] in world.place:
        return "yes" if world.place[question[1]] == about else "no"
    if number == 7:
        return COUNTS[len(world.carried.get(question[4], ()))]
    if number == 8:
        return ",".join(world.carried.get(question[2], ())) or "nothing"
    raise ValueError(f"task {number}: no answer to {' '.join(question)}")


def tell(number: int, questions: int, seed: int) -> Told:
    """Stories of our own: five times two sentences, or as many as it takes until something can be asked, and a question.

    A person and a kind of action are drawn until the action is possible; things lie at places that no sentence has told
    before someone picks them up.

    Args:
        number: of the task, one of ``NUMBERS``.
        questions: how many at least.
        seed: of the draws.
    """
    draw = Random(f"{seed}, task {number}")
    stories, asked = list[list[Words]](), list[Question]()
    while len(asked) < questions:
        sentences, more = _story(number, len(stories), draw)
        stories.append(sentences)
        asked += more
    return Told(stories, asked[:questions])


def _story(number: int, story: int, draw: Random) -> tuple[list[Words], list[Question]]:
    world, sentences, asked = World(), list[Words](), list[Question]()
    lies = {thing: draw.choice(PLACES) for thing in THINGS}
    stands = {who: draw.choice(PLACES) for who in PEOPLE}
    while len(asked) < _ASKED:
        for _ in range(_BETWEEN):
            sentences.append(_act(number, world, lies, stands, draw))
            world.hear(sentences[-1])
        if found := _ask(number, world, draw):
            words, supports = found
            told = _answer(number, world, words)
            asked.append(Question(story, len(sentences), words, told, supports, 0))
    return sentences, asked


def _act(number: int, world: World, lies: dict[str, str], stands: dict[str, str], draw: Random) -> Words:
    """A sentence about something that can happen, which then has happened to ``lies`` and ``stands``."""
    while True:
        who, action = draw.choice(PEOPLE), draw.choice(_ACTIONS.get(number, ("go", "get", "drop")))
        carried = world.carried.get(who, [])
        here = [thing for thing in THINGS if thing not in world.holder and lies[thing] == stands[who]]
        others = [other for other in PEOPLE if other != who and stands[other] == stands[who]]
        if action == "go":
            stands[who] = draw.choice([place for place in PLACES if place != stands[who]])
            return (who, *draw.choice(_GO).split(), "the", stands[who])
        if action == "get" and here:
            there = number != 3 or draw.random() < _THERE
            return (who, *draw.choice(_GET).split(), "the", draw.choice(here), *(("there",) if there else ()))
        if action == "drop" and carried:
            thing = draw.choice(carried)
            lies[thing] = stands[who]
            there = draw.random() < _THERE
            return (who, *draw.choice(_DROP).split(), "the", thing, *(("there",) if there else ()))
        if action == "give" and carried and others:
            return (who, *draw.choice(_GIVE).split(), "the", draw.choice(carried), "to", draw.choice(others))


def _ask(number: int, world: World, draw: Random) -> tuple[Words, tuple[int, ...]] | None:
    """A question that the sentences answer, and those it follows from; None if what was drawn cannot be asked."""
    known = world.events if number in (7, 8) else world.place
    who, thing = draw.choice(sorted(known) or PEOPLE), draw.choice(THINGS)
    if number == 3:
        found = (_ask_before(world, thing, draw) for thing in draw.sample(THINGS, len(THINGS)))
        return next((question for question in found if question), None)
    if number == 1 and who in world.place:
        return ("where", "is", who), (world.moved[who],)
    if number == 2 and world.where(thing):
        return ("where", "is", "the", thing), world.history[thing][-1][1]
    if number == 6 and who in world.place:
        others = [place for place in PLACES if place != world.place[who]]
        place = world.place[who] if draw.random() < 0.5 else draw.choice(others)
        return ("is", who, "in", "the", place), (world.moved[who],)
    if number == 7 and who in world.events:
        return ("how", "many", "objects", "is", who, "carrying"), tuple(world.events[who])
    if number == 8 and who in world.events:
        return ("what", "is", who, "carrying"), tuple(world.events[who])
    return None


def _ask_before(world: World, thing: str, draw: Random) -> tuple[Words, tuple[int, ...]] | None:
    """A question about the place before one to which a thing was lately carried, as official ones are.

    Whoever had it last carried it to both places, and has moved with it or put it down within the last sentences.
    """
    history = world.history.get(thing, [])
    if len(history) < 2 or (thing in world.holder and draw.random() < _PUT_DOWN):
        return None
    n = len(history) - 1
    while n > 1 and draw.random() < _EARLIER:
        n -= 1
    (place, (taken, came)), (_, (also_taken, came_before)) = history[n], history[n - 1]
    newest = came if thing in world.holder else world.handled[thing]
    carried = world.taken[thing] == taken == also_taken < came_before
    if not carried or newest < world.told - _RECENT or place in (later for later, _ in history[n + 1 :]):
        return None
    supports = (came, came_before, taken) if thing in world.holder else (newest, came, came_before)
    return ("where", "was", "the", thing, "before", "the", place), supports
