# One image for every role. The command and the health check of each role are in docker-compose.yml.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# An alternative package index. It does not end up in the final image.
ARG PIP_INDEX_URL
RUN python3 -m venv /opt/penstock
WORKDIR /build
# Dependencies in their own layer: a change of our code does not install them again.
COPY pyproject.toml constraints.txt ./
RUN touch README.md LICENSE \
    && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt '.[app]'
# .dockerignore lists what is copied.
COPY . .
RUN /opt/penstock/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
    && /opt/penstock/bin/pip uninstall --yes setuptools pip

FROM ${BASE}
# Set it to the owner of the directory if one is mounted at /data instead of a volume.
ARG UID=1000
RUN groupadd --gid ${UID} penstock \
    && useradd --uid ${UID} --gid ${UID} --no-create-home --shell /usr/sbin/nologin penstock \
    && install --directory --owner=penstock --group=penstock /data
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Celery imports from its working directory, so it must not be one that others can write to.
WORKDIR /opt/penstock
USER ${UID}:${UID}
CMD ["penstock", "--help"]
COPY --from=build /opt/penstock /opt/penstock
