FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml README.md ./
COPY hpo ./hpo
COPY storage ./storage
COPY search_spaces ./search_spaces

# The folders are made here so that a new volume mounted on them belongs to the user.
RUN pip install --no-cache-dir . \
    && useradd --create-home --uid 1000 hpo \
    && install -d -o hpo -g hpo /home/hpo/runs /home/hpo/data /home/hpo/work

USER 1000:1000
WORKDIR /home/hpo/work
ENV HPO_HOME=/home/hpo/runs HPO_DATA_DIR=/home/hpo/data
ENTRYPOINT ["hpo"]
CMD ["--help"]
