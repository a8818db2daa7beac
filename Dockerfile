# One image for every role: what it does is the command's business, and so is its health check (docker-compose.yml).
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# For those who have a package index of their own; it is not in the image that comes out.
ARG PIP_INDEX_URL
RUN python3 -m venv /opt/penstock
WORKDIR /build
# The packages of others by themselves: a change of our code does not fetch them again.
COPY pyproject.toml constraints.txt ./
RUN touch README.md LICENSE \
    && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt '.[app]'
# What of the repository comes along is said in .dockerignore.
COPY . .
RUN /opt/penstock/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
    && /opt/penstock/bin/pip uninstall --yes setuptools pip

FROM ${BASE}
# Of whoever owns a directory that is mounted at /data in place of a volume.
ARG UID=1000
RUN groupadd --gid ${UID} penstock \
    && useradd --uid ${UID} --gid ${UID} --no-create-home --shell /usr/sbin/nologin penstock \
    && install --directory --owner=penstock --group=penstock /data
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Celery imports from where it is started: never from a directory that others write to.
WORKDIR /opt/penstock
USER ${UID}:${UID}
CMD ["penstock", "--help"]
COPY --from=build /opt/penstock /opt/penstock
