/* The wall clock of one machine, moved: preloaded into its processes (LD_PRELOAD), it adds to every time of day the
 * nanoseconds (int64) in the file that MOVED_CLOCK names. The deadline of a wait is put back by as much, so a wait lasts
 * as long as its caller asked for. Other clocks and the times of files stay right. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000
#define REAL(name)                                                                                                     \
  ({                                                                                                                   \
    static _Atomic(__typeof__(&name)) real;                                                                            \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name);                                                      \
    real;                                                                                                              \
  })

static _Atomic int64_t none, *offset = &none;

__attribute__((constructor)) static void find_offset(void) {
  const char *path = getenv("MOVED_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *place = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (place != MAP_FAILED) offset = place;
}

static struct timespec moved(struct timespec time, int64_t by) {
  time.tv_sec += by / SECOND;
  time.tv_nsec += by % SECOND;
  if (time.tv_nsec < 0) time.tv_sec--, time.tv_nsec += SECOND;
  if (time.tv_nsec >= SECOND) time.tv_sec++, time.tv_nsec -= SECOND;
  return time;
}

/* The true deadline. */
static struct timespec until(clockid_t clock, const struct timespec *deadline) {
  return moved(*deadline, clock == CLOCK_REALTIME ? -*offset : 0);
}

/* The clock of a deadline: nobody is up since 1970. A condition does not tell its own. */
static clockid_t clock_of(const struct timespec *deadline) {
  return deadline->tv_sec > SECOND ? CLOCK_REALTIME : CLOCK_MONOTONIC;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = REAL(clock_gettime)(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *now = moved(*now, *offset);
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec time;
  int failed = REAL(gettimeofday)(now, zone);
  if (!failed && !(failed = clock_gettime(CLOCK_REALTIME, &time)))
    *now = (struct timeval){time.tv_sec, time.tv_nsec / 1000};
  return failed;
}

time_t time(time_t *now) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return now ? *now = time.tv_sec : time.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
  return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left) {
  struct timespec time = flags & TIMER_ABSTIME ? until(clock, wanted) : *wanted;
  return REAL(clock_nanosleep)(clock, flags, &time, left);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *deadline) {
  struct timespec time = until(clock, deadline);
  return REAL(pthread_cond_clockwait)(condition, mutex, clock, &time);
}

/* Not the real one: of that there are two versions, and dlsym may find the wrong one. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
  return pthread_cond_clockwait(condition, mutex, clock_of(deadline), deadline);
}

int cnd_timedwait(cnd_t *condition, mtx_t *mutex, const struct timespec *deadline) {
  struct timespec time = until(CLOCK_REALTIME, deadline);
  return REAL(cnd_timedwait)(condition, mutex, &time);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *deadline) {
  struct timespec time = until(clock, deadline);
  return REAL(sem_clockwait)(semaphore, clock, &time);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
  return sem_clockwait(semaphore, CLOCK_REALTIME, deadline);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
  struct timespec time = until(CLOCK_REALTIME, deadline);
  return REAL(pthread_mutex_timedlock)(mutex, &time);
}
