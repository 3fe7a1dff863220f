"""Thirty varied texts for the default model, one of them long."""

TEXTS = [
    "The",
    "Gravity is",
    "Once upon a time, in a small village by the sea,",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 + 25?\nA:",
    "To be, or not to be, that is",
    "The mitochondria is the powerhouse of the cell. It produces",
    "Ingredients:\n- 2 eggs\n- 200 g flour\n- 1 pinch of salt\n\nInstructions:\n1.",
    "Dear Sir or Madam,\n\nI am writing to",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    "SELECT name, COUNT(*) FROM orders WHERE",
    'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n        self.items = []\n\n    def push(',
    '{"name": "Ada Lovelace", "born": 1815, "occupation": "',
    "<html>\n  <head><title>Hello</title></head>\n  <body>\n    <h1>",
    "for i in range(10):\n\tif i % 2 == 0:\n\t\tprint(i",
    "Bonjour, je m'appelle Claire et j'habite à",
    "Der schnelle braune Fuchs springt über",
    "El agua es esencial para",
    "Привет! Меня зовут",
    "今日は天気が",
    "人工智能是",
    "안녕하세요, 저는",
    "مرحبا بالعالم",
    "I love pizza 🍕 and",
    "🎉🎉🎉 Happy birthday 👨‍👩‍👧‍👦 to",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a poet.<|im_end|>\n<|im_start|>user\nA haiku.<|im_end|>\n<|im_start|>assistant\n",
]

LONG_TEXT = "\n\n".join(
    f"Chapter {number}. {sentence}"
    for number, sentence in enumerate(
        [
            "The ship left the harbour before dawn, and nobody on the quay waved.",
            "A lighthouse keeper counts the nights by the oil that is left.",
            "In 1911 the expedition found 34 islands, 12 of which had no name.",
            "She wrote the letter twice: once for him, and once for the drawer.",
            "Rain fell on the archive; the ink of three centuries ran together.",
        ]
        * 20,
        start=1,
    )
)
LONG_TOKENS = 1500
