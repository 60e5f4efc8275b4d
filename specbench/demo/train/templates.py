"""The words that templated and self-named training prompts are made of."""


def _listed(block: str, separator: str) -> tuple[str, ...]:
    """The entries of *block*, whose lines end entries too."""
    return tuple(block.strip().replace("\n", separator).split(separator))


TOPICS = _listed(
    """
photosynthesis|black holes|the French Revolution|machine learning|inflation|climate change
Roman law|chess|coffee|volcanoes|Shakespeare|vaccines|sleep|the stock market|renewable energy
jazz music|the Silk Road|DNA|gravity|democracy|photography|gardening|bread baking|electric cars
the human heart|the Great Wall|anxiety|football|poetry|ocean currents|robots|taxes|antibiotics
Buddhism|architecture|time zones|honey bees|mountain climbing|the printing press|dinosaurs
plastic pollution|marathons|the moon landing|cryptography|databases|Ancient Egypt|a small bakery
a lost dog|a remote village|a time traveller|remote work|public transport|microplastics|nutrition
mental health|space travel|birds|rivers|glaciers|fairy tales|a solar eclipse|public libraries
the Olympic Games|a haunted house|urban farming|opera|credit cards|earthquakes|self-driving cars
video games|tea ceremonies|the Amazon rainforest|a talking cat|wedding planning|a job interview
the Roman Empire|neural networks|supply and demand|blood pressure|the water cycle|fashion
home insurance|a school play|refugees|negotiation|statistics|evolution|a spaceship crew
street food|parenting|podcasts|artificial intelligence|hiking in Hawaii|probability
the immune system|operating systems|world trade|linear algebra|social media|cooking pasta
the French language|magnetism|chemical reactions|habits|startup funding|customer service
the Renaissance|insects|online privacy|the periodic table|a detective story|classical music|wine
pandemics|volunteering|graph theory|a birthday party|the ozone layer|superheroes|water quality
""",
    "|",
)

ABOUT_TOPIC = (
    # writing
    "Write a short story about {topic}.",
    "Compose a poem about {topic}.",
    "Write a persuasive email to a colleague about {topic}.",
    "Draft a blog post introducing {topic} to beginners.",
    "Write a product description inspired by {topic}.",
    "Write a vivid opening paragraph for a novel about {topic}.",
    (
        'Rewrite this sentence in a formal tone: "hey, {topic} is kinda cool and everybody should '
        'know about it".'
    ),
    "Write a cover letter for a job related to {topic}.",
    # roleplay
    "Pretend you are an expert on {topic} and answer a question from a curious child.",
    "You are a tour guide. Talk to me about {topic}.",
    "Act as a skeptical journalist interviewing a scientist about {topic}.",
    "Imagine you are a pirate captain explaining {topic} to your crew.",
    "Play the role of a teacher and give me a lesson about {topic}.",
    # reasoning
    (
        "If all people who like {topic} also like tea, and Sam does not like tea, does Sam like "
        "{topic}? Explain."
    ),
    "What would happen if {topic} disappeared tomorrow?",
    "Compare the advantages and disadvantages of {topic}.",
    (
        "Tom is taller than Ann, Ann is taller than Joe. Who is the shortest? Then relate it to "
        "{topic}."
    ),
    "Is it ethical to invest public money in {topic}? Argue both sides.",
    # science and engineering
    "Explain {topic} in simple terms.",
    "What are the main causes of {topic} and how do they work?",
    "What is the science behind {topic}?",
    "Describe an experiment that a student could do to learn about {topic}.",
    "How do engineers use knowledge of {topic}?",
    # humanities
    "Discuss the cultural importance of {topic}.",
    "How did {topic} change society over the last two centuries?",
    "Write an outline of an essay about {topic}.",
    "What can philosophy teach us about {topic}?",
    "Summarize the history of {topic} in five bullet points.",
    # extraction
    (
        'Extract all the names and places from this text and return JSON: "Maria went to Lisbon to '
        'learn about {topic} with her friend Otto from Berlin."'
    ),
    "List the key facts about {topic} as a numbered list.",
    (
        "Classify the sentiment of these reviews about {topic}: 1. I loved it. 2. It was a waste "
        "of time. 3. Okay, nothing special."
    ),
    "Give me a table with five facts about {topic}.",
    (
        'Summarize the following in one sentence: "Many people study {topic} because it affects '
        'daily life, yet few understand it in depth."'
    ),
)

WITH_NUMBERS = (
    "A shop sells {small} apples for ${middle}. How much do {large} apples cost?",
    "What is {small} plus {middle} times {large}?",
    "Solve for x: {small}x + {middle} = {large}.",
    "A train travels {small} km in {middle} hours. What is its average speed?",
    "Find the area of a rectangle with sides {small} and {middle}.",
    "If f(x) = {small}x^2 - {middle}x + {large}, what is f(2)?",
    "What is {small}% of {large}?",
    (
        "There are {small} red balls and {middle} blue balls in a bag. What is the probability of "
        "drawing a red ball?"
    ),
    "Compute the mean of {small}, {middle} and {large}.",
    (
        "Sara has {large} coins. She gives {middle} to Tom and finds {small} more. How many coins "
        "does she have now?"
    ),
)

ABOUT_CODE = (
    "Write a Python function that {task}.",
    "Write a program in C++ that {task}.",
    "How do I write JavaScript code that {task}?",
    "Implement an algorithm that {task} and explain its time complexity.",
    "Write a Python script that {task} and add comments.",
    "Fix and improve my code; it {task} but is slow.",
)

CODE_TASKS = _listed(
    """
checks whether a string is a palindrome|counts the words in a file
sorts a list of tuples by the second element|finds the second largest number in a list
computes the nth Fibonacci number|removes duplicates from a list|merges two dictionaries
reverses a linked list|parses a CSV file|finds all prime numbers below n
converts Roman numerals to integers|computes the factorial recursively|implements binary search
validates an email address|returns the longest word in a sentence
computes the dot product of two vectors|flattens a nested list|transposes a matrix|counts vowels
implements a stack with two queues|detects a cycle in a graph|computes edit distance
groups anagrams|rotates an array by k places|checks balanced parentheses
computes the greatest common divisor|downloads a web page|draws a triangle of stars
serves a simple HTTP API|finds pairs that sum to a target
""",
    "|",
)

# How a chat asks for the rest of a function; the bare code is the commonest.
ASK_TO_COMPLETE = (
    "{code}",
    "{code}",
    "{code}",
    "Complete the following Python function:\n\n{code}",
    "Please continue to complete the function.\n```python\n{code}\n```",
    "Implement this function.\n\n```python\n{code}```",
)

# What stands above a function in a file.
PREAMBLES = (
    "",
    "",
    "",
    "from typing import List\n\n\n",
    "import math\n\n\n",
    "from typing import List, Optional, Tuple\n\n\n",
    "\n",
)
SELF_NAMED_PREAMBLES = ("from typing import List\n\n\n", "", "\n\n", "import math\n\n\n")

VERBS = _listed(
    """
count find get compute remove filter sort merge split check is_valid sum reverse convert encode
decode rotate max_of min_of group unique flatten parse replace generate calculate
""",
    " ",
)

NOUNS = _listed(
    """
numbers words string elements list digits pairs vowels primes brackets matrix intervals characters
substrings duplicates values tokens words_by_length fibonacci factors palindrome dates
temperatures grades
""",
    " ",
)

SIGNATURES = (
    '(numbers: List[int]) -> int:\n    """',
    '(s: str) -> str:\n    """',
    '(lst):\n    """',
    '(numbers: List[float], threshold: float) -> bool:\n    """',
    '(n: int) -> List[int]:\n    """\n    ',
    "(text, k):\n    '''",
    '(words: List[str]) -> List[str]:\n    """ ',
    '(a, b):\n    """\n    ',
    "(",
    '(arr):\n    """',
)
