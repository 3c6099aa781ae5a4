"""Writes the pictures of the demo, pictures/, and the rows about them, demo_images.jsonl.

Needs Pillow: python3 host/assets/make_pictures.py
"""

import json
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent
COLOURS = {"red": (210, 30, 40), "green": (30, 160, 60), "blue": (40, 70, 210), "yellow": (240, 200, 40)}
SHAPES = ["circle", "square", "triangle"]
PLACES = {"left": 10, "middle": 16, "right": 22}


def draw(shape, colour, x=16, y=16, radius=9):
    picture = Image.new("RGB", (32, 32), (250, 250, 245))
    pen = ImageDraw.Draw(picture)
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=COLOURS[colour])
    return picture


def image(name):
    return {"type": "image", "image": f"pictures/{name}"}


def text(words):
    return {"type": "text", "text": words}


def row(content, answer):
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def main():
    (FOLDER / "pictures").mkdir(exist_ok=True)
    rows = []
    for colour in COLOURS:
        for shape in SHAPES:
            name = f"{colour}_{shape}.png"
            draw(shape, colour).save(FOLDER / "pictures" / name, optimize=True)
            rows.append(row([image(name), text("What is in the picture?")], f"A {colour} {shape}."))
            rows.append(row([text("Which colour is this?"), image(name)], f"It is {colour}."))
    # The formats of cameras and web pages.
    draw("circle", "blue", radius=12).save(FOLDER / "pictures" / "photo.jpg", quality=90)
    rows.append(row([image("photo.jpg"), text("What is in the picture?")], "A blue circle."))
    draw("square", "yellow", radius=12).save(FOLDER / "pictures" / "web.webp", quality=90)
    rows.append(row([image("web.webp"), text("What is in the picture?")], "A yellow square."))
    # Two pictures in a row.
    for first, second in [("red", "green"), ("blue", "yellow"), ("green", "blue"), ("yellow", "red")]:
        parts = [image(f"{first}_circle.png"), image(f"{second}_square.png"), text("Which colours do you see?")]
        rows.append(row(parts, f"First {first}, then {second}."))
    # Films of three frames.
    for start, end in [("left", "right"), ("right", "left")]:
        frames = []
        for frame, place in enumerate([start, "middle", end]):
            name = f"to_the_{end}_{frame}.png"
            draw("circle", "red", x=PLACES[place], radius=6).save(FOLDER / "pictures" / name, optimize=True)
            frames.append(f"pictures/{name}")
        film = {"type": "video", "video": frames, "fps": 2}
        rows.append(row([film, text("Where does it go?")], f"To the {end}."))
    rows.append(row("Which shapes do you know?", "Circle, square and triangle."))
    lines = [json.dumps(row) for row in rows]
    (FOLDER / "demo_images.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
