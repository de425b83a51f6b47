"""One plug-in of each kind; docs/plugins.md explains them."""

from dataclasses import replace

from mmtrain.families import FAMILIES


class CsvTracker:
    """A tracker: writes step and loss into `steps.csv` of the run's folder."""

    def start(self, run):
        self.path = run.run_dir / "steps.csv"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        lines = [line for line in lines if int(line.split(",")[0]) < run.first_step]
        self.path.write_text("".join(f"{line}\n" for line in lines))
        return len(lines)

    def log_step(self, step, scalars):
        with self.path.open("a") as file:
            file.write(f"{step},{scalars.get('train/loss')}\n")

    def log_answers(self, step, answers): ...

    def flush(self): ...

    def finish(self, end, summary):
        self.path.with_suffix(".end").write_text(end)

    def abandon(self): ...


class LossRatio:
    """A step hook: logs the loss over that of the first step, and halves the learning rate of step 2."""

    def __init__(self, run):
        self.first = None

    def before_step(self, step):
        return step.lr / 2 if step.step == 2 else None

    def after_step(self, step):
        self.first = self.first or step.metrics["loss"]
        return {"loss_ratio": step.metrics["loss"] / self.first}


def first_letter(answers):
    """A metric: the share of answers whose first letter is right."""
    return sum(a.answered[:1] == a.expected[:1] for a in answers) / max(len(answers), 1)


def read_tsv(file, path):
    """A data format: lines of `image<TAB>question<TAB>answer`."""
    for line in file:
        image, question, answer = line.decode().rstrip("\n").split("\t")
        turns = [{"from": "human", "value": f"<image>{question}"}, {"from": "gpt", "value": answer}]
        yield {"image": image, "conversations": turns}


# A family: Llama under the name that another trainer gives it.
EXAMPLE_LLAMA = replace(FAMILIES["llama"], name="example_llama", architectures=("ExampleForCausalLM",))
