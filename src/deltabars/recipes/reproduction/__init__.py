"""The paper's experiments from one command: stages that are kept, results and figures."""
