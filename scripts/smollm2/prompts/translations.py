"""German, French and English sentences to translate, put together from parts.

A sentence is a subject, a predicate and an ending. The predicate is its source: the last of each
language are held out.
"""

from __future__ import annotations

import random

HELD_OUT = {"test": 1, "valid": 2}
"""Predicates of each language that are held out, from the last one backwards."""
ASKED = {
    "German": (
        "Translate German to English: {}", "Translate this sentence into English:\n{}",
        "What does this mean in English?\n\n{}", "Please translate from German: {}",
    ),
    "French": (
        "Translate French to English: {}", "Translate this text into English:\n\n{}",
        "What is the English translation of \"{}\"?",
    ),
    "English": (
        "Translate English to German: {}", "Translate into French: {}",
        "How do you say this in Spanish?\n\n{}",
    ),
}  # fmt: skip
SUBJECTS = {
    "German": (
        "Die Regierung", "Der Bürgermeister", "Eine Sprecherin der Polizei", "Das Unternehmen",
        "Der Verein", "Die junge Ärztin", "Unser Nachbar", "Das Museum am Hafen", "Die Lehrerin",
        "Der neue Trainer", "Ein Bauer aus der Gegend", "Das Orchester", "Die Bahn", "Meine Tante",
        "Der Richter", "Die Universität", "Ein bekannter Koch", "Der Hersteller",
    ),
    "French": (
        "Le gouvernement", "La mairie", "Un porte-parole de la police", "L'entreprise", "Le club",
        "La jeune avocate", "Notre voisin", "Le musée de la ville", "L'institutrice",
        "Le nouvel entraîneur", "Un paysan de la région", "L'orchestre", "Ma tante", "Le juge",
        "L'université", "Un cuisinier célèbre", "Le fabricant", "La bibliothèque",
    ),
    "English": (
        "The government", "The mayor", "A spokesman of the police", "The company", "The club",
        "The young doctor", "Our neighbour", "The museum at the harbour", "The teacher",
        "The new coach", "A farmer of the region", "The orchestra", "The railway", "My aunt",
        "The judge", "The university", "A well-known cook", "The manufacturer",
    ),
}  # fmt: skip
PREDICATES = {
    "German": (
        "hat am Montag neue Pläne für das kommende Jahr vorgestellt",
        "sucht seit Wochen nach einer Lösung für den Streit",
        "will die Preise im Herbst um drei Prozent erhöhen",
        "hat die Einladung nach Wien nicht angenommen",
        "freut sich über mehr Besucher als im letzten Sommer",
        "muss die Brücke über den Fluss bis März sperren lassen",
        "erzählte den Kindern eine Geschichte aus alten Zeiten",
        "warnt vor starkem Regen und glatten Straßen",
        "braucht für diese Arbeit mindestens zwei weitere Helfer",
        "hat den Vertrag mit dem spanischen Partner verlängert",
        "kaufte auf dem Markt frisches Brot, Käse und Äpfel",
        "beginnt morgen mit dem Bau eines größeren Hauses",
        "lehnt den Vorschlag der Gewerkschaft weiterhin ab",
        "hat in der zweiten Halbzeit kein Tor mehr erzielt",
        "öffnet künftig auch an Sonntagen von zehn bis achtzehn Uhr",
        "schickte allen Kunden einen Brief mit wichtigen Hinweisen",
        "verlor bei dem Unfall glücklicherweise nur einen Schlüssel",
        "plant gemeinsam mit den Schülern eine Reise ans Meer",
    ),
    "French": (
        "a présenté lundi ses projets pour l'année prochaine",
        "cherche depuis des semaines une solution au conflit",
        "veut augmenter les prix de trois pour cent en automne",
        "n'a pas accepté l'invitation à venir à Genève",
        "a reçu plus de visiteurs que l'été dernier",
        "doit fermer le pont jusqu'au mois de mars",
        "a raconté aux enfants une histoire d'autrefois",
        "met en garde contre la pluie et les routes glissantes",
        "a besoin d'au moins deux personnes pour ce travail",
        "a prolongé le contrat avec son partenaire espagnol",
        "a acheté du pain frais, du fromage et des pommes au marché",
        "commencera demain la construction d'une maison plus grande",
        "refuse toujours la proposition du syndicat",
        "n'a marqué aucun but en seconde période",
        "sera aussi ouverte le dimanche, de dix à dix-huit heures",
        "a envoyé à tous les clients une lettre importante",
        "prépare avec les élèves un voyage au bord de la mer",
    ),
    "English": (
        "presented new plans for the coming year on Monday",
        "has been looking for a way out of the dispute for weeks",
        "wants to raise prices by three percent in autumn",
        "did not accept the invitation to Vienna",
        "is glad about more visitors than last summer",
        "has to close the bridge over the river until March",
        "told the children a story of the old days",
        "warns of heavy rain and slippery roads",
        "needs at least two more helpers for this work",
        "bought fresh bread, cheese and apples at the market",
        "begins to build a larger house tomorrow",
        "still refuses the offer of the union",
        "will also open on Sundays from ten to six",
        "sent all customers a letter with important advice",
        "is planning a trip to the sea with the pupils",
    ),
}
ENDINGS = {
    "German": (
        ".", ", wie gestern mitgeteilt wurde.", ", obwohl dafür bisher das Geld fehlt.",
        " und hofft auf ein gutes Ergebnis.",
        ", weil sich in den letzten Jahren vieles verändert hat.",
        ", sagte ein Reporter am Abend.", ", und das ist erst der Anfang.",
    ),
    "French": (
        ".", ", selon un communiqué publié hier.", ", bien que l'argent manque pour le moment.",
        " et espère un bon résultat.", ", parce que beaucoup de choses ont changé.",
        ", et ce n'est que le début.",
    ),
    "English": (
        ".", ", as was announced yesterday.", ", although the money is still missing.",
        " and hopes for a good result.", ", because much has changed in recent years.",
        ", and that is only the beginning.",
    ),
}  # fmt: skip


def translation_questions(split: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return source and text of `count` questions; half of the sentences are German."""
    draw = random.Random(f"translations {split} {seed}")
    chosen = draw.choices(tuple(ASKED), weights=(2, 1, 1), k=count)
    return [question(split, language, draw) for language in chosen]


def question(split: str, language: str, draw: random.Random) -> tuple[str, str]:
    """Return source and text of a question about one or two sentences."""
    predicates = draw.sample(of_split(split, PREDICATES[language]), draw.choice((1, 1, 2)))
    sentences = " ".join(
        f"{draw.choice(SUBJECTS[language])} {predicate}{draw.choice(ENDINGS[language])}"
        for predicate in predicates
    )
    return " + ".join(sorted(predicates)), draw.choice(ASKED[language]).format(sentences)


def of_split(split: str, predicates: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of a split: held-out ones twice, since a question takes two at most."""
    test, valid = HELD_OUT["test"], HELD_OUT["valid"]
    kept = len(predicates) - test - valid
    parts = {
        "train": predicates[:kept],
        "valid": predicates[kept:-test],
        "test": predicates[-test:],
    }
    return parts[split] if len(parts[split]) > 1 else parts[split] * 2
