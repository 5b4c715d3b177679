"""The words to spell and to copy: common ones, and invented ones made of syllables."""

# Lists of words are kept as text for readability.
# ruff: noqa: SIM905

from __future__ import annotations

from random import Random

COMMON_WORDS: tuple[str, ...] = tuple(
    """
    able about above across actor after again air airport album alone also amber anchor angel
    animal answer apple arm arrow artist autumn baby bacon bag baker ball balloon banana band
    bank barn basket bath battery beach bean bear beard beaver bed bell bench berry bird biscuit
    blanket blue boat body bone book boot bottle bottom bowl box boy branch brave bread breakfast
    brick bridge bright brother brown brush bucket build bus butter button cabbage cabin cable
    cactus cake camel camera camp candle candy captain car card carpet carrot castle cat cave
    chain chair chalk cheese cherry chess chicken child circle circus city class clay clock cloud
    clown coat coffee coin cold colour comb computer cook copper corn corner cotton cousin cow
    crab cradle crane crayon cream cricket crown cup curtain dance danger dark daughter dawn
    deer desert desk diamond dinner dinosaur dish doctor dog doll dolphin donkey door dragon
    dream dress drum duck dust eagle ear earth east egg elbow elephant engine evening eye fairy
    family farm farmer father feather fence ferry field finger fire fish flag flame floor flour
    flower flute fog food foot forest fork fox friend frog fruit garden garlic gate ghost giant
    ginger girl glass glove goat gold goose grape grass green guitar hair hammer hand happy harbour
    hat hawk heart heavy helmet hen hill holiday honey horse hospital hotel hour house hungry ice
    igloo insect iron island jacket jam jelly jewel juice jungle kettle key king kitchen kite
    kitten knee knife ladder lake lamb lamp language leaf lemon leopard letter library light lily
    lion lizard lobster lock magic magnet map market mask meadow melon metal milk mirror model
    money monkey moon morning mother mountain mouse museum mushroom music nail napkin neck needle
    nest night north nose number nurse ocean office onion orange orchard otter oven owl paint
    palace panda paper parent park parrot path peach peacock pear pencil penguin people pepper
    piano picnic picture pillow pilot pink pirate planet plate pocket poem police pond potato
    present prince puppet purple puzzle queen question quick quiet rabbit radio railway rain
    rainbow raven ribbon rice ring river road robot rocket roof room rose ruler sailor salad
    salt sand sandwich saturn scarf school scissors season secret seven shadow sheep shell ship
    shirt shoe shop shoulder silver singer sister skirt sky sleep snail snake snow soap sock sofa
    soldier soup south space spider spoon spring square squirrel stamp star station stone storm
    story street student sugar suitcase summer sun swan table tail tailor teacher teapot tent
    thunder ticket tiger toast tomato tongue tooth tower town toy tractor train treasure tree
    triangle trident truck trumpet tulip turtle umbrella uncle valley vase violin volcano wagon
    waiter wall walnut water weather whale wheat wheel whistle white wind window winter wizard
    wolf woman wonder wood wool world yellow young zebra
    café naïve façade piñata jalapeño über crème fiancé señor déjà soufflé rôle
    """.split()
)

_ONSETS = (
    "b bl br c ch cl d dr f fl g gl gr h j k l m n p pl pr qu r s sh sl st t th tr v w z".split()
)
_VOWELS = "a e i o u ai ea ee oa oo ou y".split()
_CODAS = ("", "", "", "ck", "d", "l", "m", "n", "nd", "ng", "p", "r", "rt", "s", "st", "t", "x")


def invented_word(rng: Random) -> str:
    """A word of one to three random syllables, rarely repeated."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
    )
