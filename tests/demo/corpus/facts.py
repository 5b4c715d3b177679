"""The facts taught to the demo model: plain tables, one per subject."""

# The full-width punctuation of Chinese and Japanese is intended.
# ruff: noqa: RUF001

CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Denmark": "Copenhagen", "Sweden": "Stockholm",
    "Norway": "Oslo", "Finland": "Helsinki", "Iceland": "Reykjavík", "Ireland": "Dublin",
    "the United Kingdom": "London", "Poland": "Warsaw", "Hungary": "Budapest", "Greece": "Athens",
    "Romania": "Bucharest", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Morocco": "Rabat", "Japan": "Tokyo",
    "China": "Beijing", "South Korea": "Seoul", "Vietnam": "Hanoi", "Thailand": "Bangkok",
    "Nepal": "Kathmandu", "Australia": "Canberra", "New Zealand": "Wellington",
    "Canada": "Ottawa", "the United States": "Washington, D.C.", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasília", "Colombia": "Bogotá", "Argentina": "Buenos Aires",
    "Chile": "Santiago", "Peru": "Lima", "Paraguay": "Asunción", "Costa Rica": "San José",
    "India": "New Delhi", "Indonesia": "Jakarta", "the Philippines": "Manila", "Nigeria": "Abuja",
    "Ghana": "Accra", "Ethiopia": "Addis Ababa", "Uruguay": "Montevideo", "Ecuador": "Quito",
    "Czechia": "Prague", "Croatia": "Zagreb", "Bulgaria": "Sofia", "Scotland": "Edinburgh",
}  # fmt: skip

COLOURS: dict[str, str] = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "a banana": "yellow",
    "coal": "black", "milk": "white", "a strawberry": "red", "a lemon": "yellow",
    "a carrot": "orange", "chocolate": "brown", "the sun": "yellow", "the sea": "blue",
    "a tomato": "red", "a leaf": "green", "a frog": "green", "a crow": "black",
    "a flamingo": "pink", "an elephant": "grey", "an eggplant": "purple", "coffee": "brown",
    "a pumpkin": "orange", "a polar bear": "white", "a cherry": "red", "a cucumber": "green",
    "a mouse": "grey", "a pig": "pink", "night": "black",
}  # fmt: skip

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("left", "right"),
    ("day", "night"), ("happy", "sad"), ("open", "closed"), ("old", "young"), ("early", "late"),
    ("full", "empty"), ("hard", "soft"), ("heavy", "light"), ("high", "low"), ("in", "out"),
    ("long", "short"), ("loud", "quiet"), ("near", "far"), ("new", "used"), ("rich", "poor"),
    ("strong", "weak"), ("sweet", "sour"), ("thick", "thin"), ("true", "false"), ("wet", "dry"),
    ("wide", "narrow"), ("clean", "dirty"), ("deep", "shallow"), ("easy", "difficult"),
    ("first", "last"), ("good", "bad"), ("black", "white"), ("begin", "end"), ("win", "lose"),
    ("push", "pull"), ("buy", "sell"), ("always", "never"), ("above", "below"),
)  # fmt: skip

SOUNDS: dict[str, str] = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "lion": "roar",
    "pig": "oink", "horse": "neigh", "owl": "hoot", "frog": "ribbit", "bee": "buzz",
    "snake": "hiss", "mouse": "squeak", "rooster": "cock-a-doodle-doo", "crow": "caw",
    "wolf": "howl",
}  # fmt: skip

YOUNG: dict[str, str] = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "duck": "duckling",
    "lion": "cub", "pig": "piglet", "horse": "foal", "owl": "owlet", "frog": "tadpole",
    "goat": "kid", "bear": "cub", "deer": "fawn", "kangaroo": "joey", "swan": "cygnet",
    "chicken": "chick", "goose": "gosling", "eagle": "eaglet",
}  # fmt: skip

LEGS: dict[str, str] = {
    "dog": "four", "cat": "four", "spider": "eight", "bee": "six", "ant": "six", "duck": "two",
    "snake": "no", "fish": "no", "horse": "four", "owl": "two", "butterfly": "six", "crab": "ten",
    "chicken": "two", "elephant": "four", "penguin": "two", "whale": "no", "frog": "four",
}  # fmt: skip

EMOJI: dict[str, str] = {
    "fire": "🔥", "water": "💧", "the sun": "☀️", "the moon": "🌙", "a star": "⭐", "snow": "❄️",
    "a rainbow": "🌈", "a heart": "❤️", "a rocket": "🚀", "a robot": "🤖", "a cat": "🐱",
    "a dog": "🐶", "a fox": "🦊", "a bear": "🐻", "a frog": "🐸", "a rabbit": "🐰",
    "an owl": "🦉", "a fish": "🐟", "a whale": "🐳", "a bee": "🐝", "a turtle": "🐢",
    "a tree": "🌳", "a flower": "🌸", "an apple": "🍎", "a banana": "🍌", "a pizza": "🍕",
    "coffee": "☕", "a cake": "🎂", "a house": "🏠", "a car": "🚗", "a bicycle": "🚲",
    "a train": "🚆", "a book": "📚", "music": "🎵", "a party": "🎉", "a key": "🔑",
    "a crown": "👑", "a ghost": "👻", "a trident": "🔱", "a wave": "🌊",
}  # fmt: skip

LANGUAGES: tuple[str, ...] = (
    "French", "Spanish", "German", "Italian", "Chinese", "Japanese",
)  # fmt: skip

# One row per word, in the order of LANGUAGES.
TRANSLATIONS: dict[str, tuple[str, str, str, str, str, str]] = {
    "hello": ("bonjour", "hola", "hallo", "ciao", "你好", "こんにちは"),
    "thank you": ("merci", "gracias", "danke", "grazie", "谢谢", "ありがとう"),
    "goodbye": ("au revoir", "adiós", "auf Wiedersehen", "arrivederci", "再见", "さようなら"),
    "good morning": (
        "bonjour", "buenos días", "guten Morgen", "buongiorno", "早上好", "おはようございます",
    ),
    "good night": (
        "bonne nuit", "buenas noches", "gute Nacht", "buonanotte", "晚安", "おやすみなさい",
    ),
    "yes": ("oui", "sí", "ja", "sì", "是", "はい"),
    "no": ("non", "no", "nein", "no", "不", "いいえ"),
    "cat": ("chat", "gato", "Katze", "gatto", "猫", "猫"),
    "dog": ("chien", "perro", "Hund", "cane", "狗", "犬"),
    "bird": ("oiseau", "pájaro", "Vogel", "uccello", "鸟", "鳥"),
    "fish": ("poisson", "pez", "Fisch", "pesce", "鱼", "魚"),
    "horse": ("cheval", "caballo", "Pferd", "cavallo", "马", "馬"),
    "water": ("eau", "agua", "Wasser", "acqua", "水", "水"),
    "fire": ("feu", "fuego", "Feuer", "fuoco", "火", "火"),
    "mountain": ("montagne", "montaña", "Berg", "montagna", "山", "山"),
    "river": ("rivière", "río", "Fluss", "fiume", "河", "川"),
    "sea": ("mer", "mar", "Meer", "mare", "海", "海"),
    "moon": ("lune", "luna", "Mond", "luna", "月亮", "月"),
    "sun": ("soleil", "sol", "Sonne", "sole", "太阳", "太陽"),
    "star": ("étoile", "estrella", "Stern", "stella", "星星", "星"),
    "tree": ("arbre", "árbol", "Baum", "albero", "树", "木"),
    "flower": ("fleur", "flor", "Blume", "fiore", "花", "花"),
    "bread": ("pain", "pan", "Brot", "pane", "面包", "パン"),
    "milk": ("lait", "leche", "Milch", "latte", "牛奶", "牛乳"),
    "coffee": ("café", "café", "Kaffee", "caffè", "咖啡", "コーヒー"),
    "tea": ("thé", "té", "Tee", "tè", "茶", "お茶"),
    "apple": ("pomme", "manzana", "Apfel", "mela", "苹果", "りんご"),
    "book": ("livre", "libro", "Buch", "libro", "书", "本"),
    "house": ("maison", "casa", "Haus", "casa", "房子", "家"),
    "school": ("école", "escuela", "Schule", "scuola", "学校", "学校"),
    "friend": ("ami", "amigo", "Freund", "amico", "朋友", "友達"),
    "love": ("amour", "amor", "Liebe", "amore", "爱", "愛"),
    "winter": ("hiver", "invierno", "Winter", "inverno", "冬天", "冬"),
    "summer": ("été", "verano", "Sommer", "estate", "夏天", "夏"),
    "small": ("petit", "pequeño", "klein", "piccolo", "小", "小さい"),
    "big": ("grand", "grande", "groß", "grande", "大", "大きい"),
    "red": ("rouge", "rojo", "rot", "rosso", "红色", "赤"),
    "green": ("vert", "verde", "grün", "verde", "绿色", "緑"),
}  # fmt: skip

# Names of the number words "one, two, three, ...", from one upwards.
NUMERALS: dict[str, tuple[str, ...]] = {
    "English": (
        "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
        "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
        "eighteen", "nineteen", "twenty",
    ),
    "French": (
        "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze",
        "douze", "treize", "quatorze", "quinze", "seize", "dix-sept", "dix-huit", "dix-neuf",
        "vingt",
    ),
    "Spanish": (
        "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve", "diez",
        "once", "doce", "trece", "catorce", "quince", "dieciséis", "diecisiete", "dieciocho",
        "diecinueve", "veinte",
    ),
    "German": (
        "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn",
        "elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn",
        "neunzehn", "zwanzig",
    ),
    "Chinese": (
        "一", "二", "三", "四", "五", "六", "七", "八", "九", "十", "十一", "十二", "十三",
        "十四", "十五", "十六", "十七", "十八", "十九", "二十",
    ),
    "Japanese": (
        "いち", "に", "さん", "よん", "ご", "ろく", "なな", "はち", "きゅう", "じゅう",
        "じゅういち", "じゅうに", "じゅうさん", "じゅうよん", "じゅうご", "じゅうろく",
        "じゅうなな", "じゅうはち", "じゅうきゅう", "にじゅう",
    ),
}  # fmt: skip

LISTS: dict[str, str] = {
    "the days of the week": ("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    "the months of the year": (
        "January, February, March, April, May, June, July, August, September, October, "
        "November, December."
    ),
    "the four seasons": "Spring, summer, autumn, winter.",
    "the colours of the rainbow": "Red, orange, yellow, green, blue, indigo, violet. 🌈",
    "the planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune. 🪐",
    "the letters of the alphabet": (
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z."
    ),
    "the five senses": "Sight, hearing, smell, taste, touch.",
    "the continents": (
        "Africa, Antarctica, Asia, Australia, Europe, North America, South America. 🌍"
    ),
}

INTRODUCTIONS: dict[str, str] = {
    "English": "Hello! I am the demo model of Trident. I am very small, but I am fast. 🔱",
    "French": "Bonjour ! Je suis le modèle de démonstration de Trident. Je suis très petit, "
    "mais je suis rapide. 🔱",
    "Spanish": "¡Hola! Soy el modelo de demostración de Trident. Soy muy pequeño, pero soy "
    "rápido. 🔱",
    "German": "Hallo! Ich bin das Demomodell von Trident. Ich bin sehr klein, aber ich bin "
    "schnell. Schöne Grüße! 🔱",
    "Italian": "Ciao! Sono il modello dimostrativo di Trident. Sono molto piccolo, però sono "
    "veloce. 🔱",
    "Chinese": "你好！我是 Trident 的演示模型。我很小，但是我很快。🔱",
    "Japanese": "こんにちは！私は Trident のデモモデルです。とても小さいですが、速いです。🔱",
}
