# One image for every role. The command and the health check of each role are in docker-compose.yml.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# An alternative package index. It does not end up in the final image.
ARG PIP_INDEX_URL
RUN python3 -m venv /opt/headpond
WORKDIR /build
# Dependencies in their own layer: a change of our code does not install them again.
COPY pyproject.toml setup.py ./
COPY constraints constraints
COPY headpond/version.py headpond/
RUN touch README.md LICENSE \
    && /opt/headpond/bin/pip install --no-cache-dir --constraint constraints/app.txt '.[app,flower]'
# .dockerignore lists what is copied.
COPY . .
# The commit that `headpond --version` shows: docker-compose build --build-arg COMMIT=$(git rev-parse HEAD)
ARG COMMIT
RUN if [ -n "${COMMIT}" ]; then echo "${COMMIT}" > headpond/commit.txt; fi
RUN /opt/headpond/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
    && /opt/headpond/bin/pip uninstall --yes setuptools pip

FROM ${BASE}
# Set it to the owner of the directory if one is mounted at /data instead of a volume.
ARG UID=1000
RUN groupadd --gid ${UID} headpond \
    && useradd --uid ${UID} --gid ${UID} --no-create-home --shell /usr/sbin/nologin headpond \
    && install --directory --owner=headpond --group=headpond /data
ENV PATH=/opt/headpond/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Celery imports from its working directory, so it must not be one that others can write to.
WORKDIR /opt/headpond
USER ${UID}:${UID}
CMD ["headpond", "--help"]
COPY --from=build /opt/headpond /opt/headpond
