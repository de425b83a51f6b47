"""Orders written down for the master test: encoder work in parts, between and inside the LLM's actions.

Vision has four layers (patches, two blocks, projector), the LLM five (embedding, three blocks, head); four waves.
"""

# A whole LLM and a whole encoder on the same TP group.
TOGETHER = (
    "F vision.0 vision:0.0",
    "F llm.0 llm:0.0 |2| PF vision.0 vision:0.1 0:2",
    "PF vision.0 vision:0.1 2:4",
    "B llm.0 llm:0.0 |3| PF vision.0 vision:0.2 0:3",
    "PF llm.0 llm:0.1 0:2",
    "PB vision.0 vision:0.0 3:4",
    "PF llm.0 llm:0.1 2:5 |4| PB vision.0 vision:0.0 1:3",
    "B llm.0 llm:0.1 |1| PB vision.0 vision:0.0 0:1, PF vision.0 vision:0.2 3:4",
    "F vision.0 vision:0.3",
    "F llm.0 llm:0.2",
    "PF llm.0 llm:0.3 0:1",
    "PB llm.0 llm:0.2 1:5 |2| PB vision.0 vision:0.1 2:4",
    "PB llm.0 llm:0.2 0:1",
    "PB vision.0 vision:0.1 0:2",
    "PF llm.0 llm:0.3 1:5",
    "B vision.0 vision:0.2",
    "B llm.0 llm:0.3",
    "PB vision.0 vision:0.3 1:4",
    "PB vision.0 vision:0.3 0:1",
)

# An LLM pipeline of two stages, of two and three layers, and an encoder replica on each of its ranks.
PIPELINE = {
    0: (
        "F vision.0 vision:0.0",
        "F llm.0 llm:0.0 |1| PF vision.0 vision:0.1 0:2",
        "PF vision.0 vision:0.1 2:4",
        "F llm.0 llm:0.1 |1| PF vision.0 vision:0.2 0:4",
        "B llm.0 llm:0.0 |1| PF vision.0 vision:0.3 0:3",
        "F llm.0 llm:0.2",
        "PB vision.0 vision:0.0 3:4",
        "B llm.0 llm:0.1 |1| PB vision.0 vision:0.0 0:3",
        "PF vision.0 vision:0.3 3:4",
        "F llm.0 llm:0.3",
        "B llm.0 llm:0.2",
        "B vision.0 vision:0.2",
        "B llm.0 llm:0.3",
        "B vision.0 vision:0.1",
        "PB vision.0 vision:0.3 2:4",
        "PB vision.0 vision:0.3 0:2",
    ),
    1: (
        "F vision.0 vision:1.0",
        "F vision.0 vision:1.1",
        "F llm.1 llm:0.0 |2| PF vision.0 vision:1.2 0:1",
        "B llm.1 llm:0.0 |1| PF vision.0 vision:1.2 1:4",
        "F llm.1 llm:0.1",
        "B llm.1 llm:0.1 |2| PF vision.0 vision:1.3 0:2",
        "PF vision.0 vision:1.3 2:4",
        "F llm.1 llm:0.2 |1| PB vision.0 vision:1.0 1:4",
        "B llm.1 llm:0.2 |2| PB vision.0 vision:1.0 0:1",
        "B vision.0 vision:1.1",
        "F llm.1 llm:0.3",
        "B llm.1 llm:0.3",
        "B vision.0 vision:1.2",
        "B vision.0 vision:1.3",
    ),
}
