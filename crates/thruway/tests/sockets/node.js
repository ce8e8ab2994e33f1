// Sockets and HTTP in Node.js, with bytes that are checked.
//
//     node.js serve PORT HTTP_PORT
//     node.js ask PORT HTTP_PORT
const net = require('net');
const http = require('http');
const crypto = require('crypto');

const [, , role, port, httpPort] = process.argv;
const BULK = 64e6;
const bulk = Buffer.alloc(1e6);
for (let i = 0; i < bulk.length; i++) bulk[i] = (i * 2654435761) >>> 24;

// Sends as fast as the other end takes it.
function pour(socket, then) {
    let sent = 0;
    (function go() {
        while (sent < BULK) {
            sent += bulk.length;
            if (!socket.write(bulk)) return socket.once('drain', go);
        }
        then();
    })();
}

function hash() {
    return crypto.createHash('sha256');
}

const wanted = hash();
for (let i = 0; i < BULK / bulk.length; i++) wanted.update(bulk);
const digest = wanted.digest('hex');

function check(holds, what) {
    if (!holds) {
        console.log('failed:', what);
        process.exit(1);
    }
}

if (role === 'serve') {
    // The first byte says what: an echo, much to the client, or much from it.
    net.createServer((socket) => {
        socket.setNoDelay();
        socket.on('error', () => {});
        socket.once('data', (first) => {
            const what = String.fromCharCode(first[0]);
            const rest = first.subarray(1);
            if (what === 'e') {
                if (rest.length) socket.write(rest);
                socket.on('data', (data) => socket.write(data));
            } else if (what === 'o') {
                pour(socket, () => socket.end());
            } else {
                const got = hash().update(rest);
                let n = rest.length;
                socket.on('data', (data) => {
                    got.update(data);
                    n += data.length;
                    if (n === BULK) socket.end(got.digest('hex'));
                });
            }
        });
    }).listen(+port, '127.0.0.1');
    http.createServer((request, response) => {
        const got = hash();
        request.on('data', (data) => got.update(data));
        request.on('end', () => response.end(got.digest('hex') + 'x'.repeat(200000)));
    }).listen(+httpPort, '127.0.0.1');
} else {
    ask().then(() => process.exit(0));
}

function pingPong(size, rounds) {
    return new Promise((done) => {
        const socket = net.connect(+port, '127.0.0.1', () => {
            socket.setNoDelay();
            socket.write('e');
            next();
        });
        let round = 0, got = [], length = 0, message;
        function next() {
            message = crypto.randomBytes(size);
            socket.write(message);
        }
        socket.on('data', (data) => {
            got.push(data);
            length += data.length;
            if (length < size) return;
            check(Buffer.concat(got).equals(message), 'ping-pong');
            [got, length] = [[], 0];
            if (++round < rounds) return next();
            socket.end();
            done();
        });
        socket.on('error', (error) => check(false, error.message));
    });
}

function download() {
    return new Promise((done) => {
        const got = hash();
        const socket = net.connect(+port, '127.0.0.1', () => socket.write('o'));
        socket.on('data', (data) => got.update(data));
        socket.on('end', () => {
            check(got.digest('hex') === digest, 'download');
            done();
        });
        socket.on('error', (error) => check(false, error.message));
    });
}

function upload() {
    return new Promise((done) => {
        let told = '';
        const socket = net.connect(+port, '127.0.0.1', () => {
            socket.write('i');
            pour(socket, () => {});
        });
        socket.on('data', (data) => (told += data));
        socket.on('end', () => {
            check(told === digest, 'upload');
            done();
        });
        socket.on('error', (error) => check(false, error.message));
    });
}

function posts(count) {
    const agent = new http.Agent({ keepAlive: true, maxSockets: 2 });
    const one = (left) =>
        new Promise((done) => {
            const body = crypto.randomBytes(300000);
            const options = { host: '127.0.0.1', port: +httpPort, method: 'POST', agent, headers: { 'content-length': body.length } };
            const request = http.request(options, (response) => {
                let told = '';
                response.on('data', (data) => (told += data));
                response.on('end', () => {
                    check(told === hash().update(body).digest('hex') + 'x'.repeat(200000), 'HTTP');
                    done(left > 1 ? one(left - 1) : undefined);
                });
            });
            request.on('error', (error) => check(false, error.message));
            request.end(body);
        });
    return Promise.all([one(count), one(count)]);
}

async function ask() {
    for (const [size, rounds] of [[64, 2000], [1000, 1000], [65536, 500], [100000, 500]])
        await Promise.all([1, 2, 3, 4].map(() => pingPong(size, rounds)));
    await Promise.all([download(), upload()]);
    await posts(100);
    console.log('all right');
}
